"""Ranks in processes of their own: the workers, a rank's process, their messages and sockets."""
