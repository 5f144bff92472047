"""What is asked and what there is to run on: requests, settings, clusters, calibrations. No torch."""
