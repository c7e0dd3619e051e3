"""A server that is killed once, at a moment a test chooses; called in its job's process."""

import os
import signal
from pathlib import Path

from delaying import VIEW

from idiolect.deploy import protocol


def die(kind, round):
    """Kill this process when nodes have just answered the first letters of a kind and round."""
    from idiolect.deploy.messenger import Messenger

    plain, mark = Messenger.ask, Path(os.environ[VIEW] + ".killed")

    def ask(self, letters, seconds, read):
        found = plain(self, letters, seconds, read)
        for blob in list(letters.values())[:1]:
            message = protocol.unpack(blob)
            if (message.kind, message.head.get("round")) == (kind, round) and not mark.exists():
                mark.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    Messenger.ask = ask
