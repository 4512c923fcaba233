"""`overlay.kubernetes`: strategic merge patches, merged, checked and applied to rendered objects."""
