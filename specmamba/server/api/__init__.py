"""The API's routes: what clients may send, how it is answered, and what both look like."""
