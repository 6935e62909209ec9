"""Small worlds: models and data sets small enough to be at hand offline; what the tour, the tests and the docs run on."""
