"""Membership: a job that loses or wins processes goes on in the same processes, with the state from their memory."""

from spmdkit.elastic.membership import Membership, ending, membership_from_env

__all__ = ["Membership", "ending", "membership_from_env"]
