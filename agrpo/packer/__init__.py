"""Samples in, whole steps out: which sample goes to which row, and how a row is laid out.

The only place where targets are shifted by one. Everything here is numpy; planning is deterministic (PACK-22).
"""
