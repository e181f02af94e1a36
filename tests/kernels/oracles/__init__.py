"""Operators against those of other packages, which no dependency brings: the tests are skipped without them."""
