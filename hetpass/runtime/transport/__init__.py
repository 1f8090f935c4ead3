"""How parts of arrays get from one process to another.

A `Transport` posts messages without waiting for them, and hands what arrives to a `Receiver`.
Which parts go where was planned by `backend/routes.py`; a transport only carries.
"""
