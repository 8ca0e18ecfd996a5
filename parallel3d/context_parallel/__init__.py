"""Context parallelism: sequences split over ranks, and attention over all of them."""
