"""A run, read from its folder: as a page, as a table, beside other runs. No torch here."""
