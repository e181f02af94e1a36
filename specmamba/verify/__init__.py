"""The step: verification of draft trees, acceptance, commit, and the recurrent states in between."""
