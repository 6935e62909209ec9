"""Small worlds: models and data sets that are small and at hand offline; what the tour, the tests and the docs use."""
