"""Small wrong changes of the product, each of which a fast test must see. `make test-mutants` runs them."""

from __future__ import annotations
