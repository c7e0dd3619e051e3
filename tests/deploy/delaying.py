"""A federation in which a node's masked report comes too late, and a server that notes everything.

Each function is called in a job's process of the real engine, by way of a `sitecustomize`.
"""

import json
import os
import time
from base64 import b64decode, b64encode

from idiolect.deploy import protocol

VIEW = "IDIOLECT_TEST_VIEW"  # names the file in which the server notes what it sees


def delay(kind, round, seconds):
    """Let this node's answer to one message wait, once it is made."""
    from idiolect.deploy.node_process import NodeProcess

    plain = NodeProcess.answer

    def answer(self, blob):
        told, message = plain(self, blob), protocol.unpack(blob)
        if message.kind == kind and message.head.get("round") == round:
            time.sleep(seconds)
        return told

    NodeProcess.answer = answer


def note():
    """Let this server write down every message and every answer, however late."""
    from idiolect.deploy.messenger import Messenger

    plain = Messenger.once

    def once(self, site, blob, seconds):
        found = plain(self, site, blob, seconds)
        answer = protocol.pack(*found.message)
        line = json.dumps([site, *(b64encode(one).decode() for one in (blob, answer))])
        with open(os.environ[VIEW], "a") as file:
            file.write(f"{line}\n")
        return found

    Messenger.once = once


def noted(path):
    """Read the server's notes: site, message and answer."""
    for line in path.read_text().splitlines():
        site, *both = json.loads(line)
        yield site, *(protocol.unpack(b64decode(one)) for one in both)
