"""A standby driver: the same program, started twice. One copy runs the flow, the other waits until that one has died.

Who is fenced is decided by Kafka alone (I6), so a false alarm costs a restart, and never a record. It may import
`driver.record`, `client`, `protocol`, `host` and `options`. ``door.py`` talks to other drivers, never to brokers. Start
reading at ``standby.py``; ``silence.py`` decides.
"""
