"""How settings are written: flags, keywords and files, their names here and elsewhere, and errors that suggest."""
