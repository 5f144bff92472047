"""Whether the plan is the best one, how soon it is made, and whether its tests notice mistakes."""
