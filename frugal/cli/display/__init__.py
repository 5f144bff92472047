"""What commands show: reports drawn to the width of a terminal, and what a run would be given."""
