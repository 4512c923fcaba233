"""`overlay.kubernetes`: strategic merge patches of the spec, which are checked and applied to rendered objects."""
