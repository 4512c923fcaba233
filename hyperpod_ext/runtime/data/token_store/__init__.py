"""Token stores: their files, writers and readers, and other file formats that can be read like a token store."""
