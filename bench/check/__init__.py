"""`frugal check` on configurations that other people wrote."""
