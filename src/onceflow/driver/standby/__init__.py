"""A standby driver: the same program, started twice. One copy runs the flow, the other waits until that one has died.

It may import ``record`` of the driver, ``client``, ``protocol``, ``host`` and ``logs``. Only ``door.py`` opens sockets:
to other drivers, never to brokers. Start reading at ``standby.py``, then ``wait.py``; ``silence.py`` decides.
"""
