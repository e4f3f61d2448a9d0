"""Lend the terminal of the pytest process to a debugger on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from pytest_fsdp_meta.worlds.conversation import Conversation, receive
from pytest_fsdp_meta.worlds.engine import Member
from pytest_fsdp_meta.worlds.rank.debugging import BORROWING, RETURNING
from pytest_fsdp_meta.worlds.system import messages
from pytest_fsdp_meta.worlds.system.messages import POST_MORTEM
from pytest_fsdp_meta.worlds.system.terminal import Terminal


def lend_for_prompt(
    conversation: Conversation, member: Member, open_terminal: Callable[[], AbstractContextManager[Terminal]]
) -> None:
    """Let a debugger that the user's code opened on this rank use the terminal for one prompt.

    If there is no terminal (entering what ``open_terminal`` returns raises ValueError), send the reason to the rank.
    """
    reply = conversation.folder / "reply"
    try:
        if member.pid is None:
            raise ValueError("it runs on another machine")
        with open_terminal() as terminal, terminal.lent_to(member.pid):
            member.send(messages.pack((BORROWING, ""), reply))
            over = False
            while not over:
                for _, message in receive([member], math.inf):
                    if message is not None and message[0] == "note":
                        conversation.handle_note(member.rank, *message[1:])
                    over = over or message is None or message[0] == RETURNING
    except ValueError as error:
        member.send(messages.pack((BORROWING, str(error)), reply))


def run_post_mortem(conversation: Conversation, rank: int, terminal: Terminal, debugger: str) -> bool:
    """Open a debugger where the last call failed on the rank; return whether the user left it with "quit".

    ``debugger`` is a class as "module:name", empty for ``pdb.Pdb``. There is no deadline: this waits for the user.
    """
    member = next(member for member in conversation.members if member.rank == rank)
    assert member.pid is not None
    with terminal.lent_to(member.pid):
        member.send(messages.pack((POST_MORTEM, debugger), conversation.folder / "call"))
        while True:
            for _, message in receive([member], math.inf):
                if message is None or message[0] == POST_MORTEM:
                    return bool(message and message[1])
