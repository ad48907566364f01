"""The local servers of ``streams dev``: Kafka, PostgreSQL, Redis and a schema registry, without a container engine.

``servers`` is the way in. ``lifecycle`` starts and stops one server; ``kafka``, ``postgres``, ``redis`` and
``registry`` say what is particular to each.
"""
