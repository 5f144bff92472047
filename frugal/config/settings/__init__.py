"""What a setting is: a field that makes its flag, key and messages; the settings of a run; other trainers' names."""
