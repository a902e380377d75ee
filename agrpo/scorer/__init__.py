"""Reward functions: found by import path, called once per group, kept in processes that can be killed."""
