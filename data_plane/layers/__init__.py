"""The parts that model families are built of."""
