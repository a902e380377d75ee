"""Weights from the trainer to the server. Sender and receiver of one mechanism stand side by side in one file.

The order is the same for all (`session.py`): pause, barrier, start, transfer, finish, resume. A mechanism is a
transport.
"""
