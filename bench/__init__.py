"""Measurements that print their numbers. They look at everything and nothing imports them."""
