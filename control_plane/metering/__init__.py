"""What use costs: the price book, and what replicas cost beside what they served."""
