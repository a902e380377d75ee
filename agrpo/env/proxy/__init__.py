"""A loopback HTTP server that gives an agent the run's model under the interfaces that agents speak.

    agent --POST /v1/chat/completions--> server.py --Ask--> session.py --token ids--> generate --Turn--> back as JSON

One secret key per rollout. A session records every call as a Turn; how a call is written on the wire stays in the file
of its interface.
"""

from agrpo.env.proxy.server import Proxy
from agrpo.env.proxy.session import Interaction, Session

__all__ = ["Interaction", "Proxy", "Session"]
