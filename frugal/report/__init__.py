"""What a run was, read from its folder: as a page, as a table, beside other runs. No torch here."""
