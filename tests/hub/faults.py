"""The fault switch: rules that match requests and change how they are carried out or answered."""

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import HubError, bad_request
from .wire import Throttle

# action -> {option: type}; options without a default below are required
ACTIONS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "status": {"status": int, "headers": dict, "body": str},  # answered at once, nothing is carried out
    "delay": {"seconds": (int, float), "when": str},
    "hold": {"when": str},  # until released
    "throttle": {"rate": (int, float)},  # bytes per second, both ways, shared by all requests of the rule
    "truncate": {
        "after": int,
        "fin": bool,
    },  # Content-Length promised, `after` body bytes sent, then RST (or FIN)
    "truncate_head": {
        "after": int,
        "fin": bool,
    },  # carried out in full, then `after` bytes of the answer's status line and headers, then RST (or FIN)
    "reset": {},  # RST before anything is carried out
    "reset_upload": {"after": int},  # RST once `after` bytes of the request body have been read
    "wrong_bytes": {"at": int},  # the byte at this offset of the FILE is inverted, whatever range is served
    "nonsense": {"body": str},  # carried out in full, then answered 200 with this body
    "lost_response": {},  # carried out in full, then RST instead of the answer
}
DEFAULTS: dict[str, Any] = {"headers": {}, "body": "", "fin": False, "when": "request"}
COMMON = {"match", "action", "times", "skip"}


@dataclass
class Rule:
    """``match`` is searched in ``METHOD path?query``; the rule skips ``skip`` matches, then applies ``times`` times."""

    id: int
    match: re.Pattern[str]
    action: str
    options: dict[str, Any]
    times: int | None
    skip: int
    throttle: Throttle | None
    seen: int = 0
    hits: int = 0
    waiting: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id, "match": self.match.pattern, "action": self.action, **self.options,
            "times": self.times, "skip": self.skip, "hits": self.hits, "waiting": self.waiting,
        }  # fmt: skip


@dataclass
class Effects:
    """The rules that apply to one request, in the order in which they were made."""

    faults: "Faults"
    rules: list[Rule]

    def first(self, action: str) -> Rule | None:
        return next((rule for rule in self.rules if rule.action == action), None)

    def named(self) -> str:
        return ",".join(rule.action for rule in self.rules)

    def waits(self, when: str) -> Iterator[Rule]:
        return (r for r in self.rules if r.action in ("delay", "hold") and r.options["when"] == when)

    @property
    def throttle(self) -> Throttle | None:
        rule = self.first("throttle")
        return rule.throttle if rule else None

    def touch(self, offset: int, length: int) -> bool:
        """Whether these bytes of a file cannot simply be sent as they are."""
        at = {rule.options["at"] for rule in self.rules if rule.action == "wrong_bytes"}
        slow = self.first("throttle") or self.first("truncate")
        return slow is not None or any(offset <= position < offset + length for position in at)

    def flips(self, offset: int, length: int) -> list[int]:
        """Offsets in the file, inside what is about to be served, whose bytes are to be inverted."""
        inside = [r for r in self.rules if r.action == "wrong_bytes" and offset <= r.options["at"] < offset + length]
        return [rule.options["at"] for rule in inside if self.faults.take(rule)]


class Faults:
    """All rules of a running Hub; requests under ``/_test`` are never matched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rules: list[Rule] = []
        self._ids = itertools.count(1)

    def add(self, request: dict[str, Any]) -> Rule:
        action = request.get("action")
        if action not in ACTIONS:
            raise bad_request(f"no such action: {action}; there are {', '.join(ACTIONS)}")
        wanted = ACTIONS[action]
        if unknown := set(request) - set(wanted) - COMMON:
            raise bad_request(f"{action} has no option {', '.join(sorted(unknown))}")
        options = {name: request[name] if name in request else DEFAULTS.get(name) for name in wanted}
        for name, kind in wanted.items():
            if not isinstance(options[name], kind):
                raise bad_request(f"{action} needs {name}, of type {kind}")
        if options.get("when") not in (None, "request", "answer"):
            raise bad_request("when is 'request' (before it is carried out) or 'answer' (after)")
        times = request.get("times")
        throttle = Throttle(request["rate"]) if action == "throttle" else None
        rule = Rule(
            next(self._ids), re.compile(request["match"]), action, options, times, request.get("skip", 0), throttle
        )
        with self._changed:
            self._rules.append(rule)
        return rule

    def listed(self) -> list[dict[str, Any]]:
        with self._changed:
            return [rule.describe() for rule in self._rules]

    def clear(self) -> None:
        with self._changed:
            rules, self._rules = self._rules, []
        for rule in rules:
            rule.released.set()

    def release(self, rule_id: int | None) -> None:
        """Let held requests go on and hold no more; the rule stays listed."""
        with self._changed:
            for rule in self._rules:
                if rule_id in (None, rule.id):
                    rule.released.set()

    def effects(self, line: str) -> Effects:
        """What applies to the request ``METHOD path?query``. A wrong byte counts when served, all else now."""
        with self._changed:
            matching = [rule for rule in self._rules if rule.match.search(line)]
            applied = [r for r in matching if r.action == "wrong_bytes" or self._take(r)]
            self._changed.notify_all()
        return Effects(self, applied)

    def take(self, rule: Rule) -> bool:
        """Count one use of the rule; False if it is used up or still skipping."""
        with self._changed:
            self._changed.notify_all()
            return self._take(rule)

    def _take(self, rule: Rule) -> bool:
        rule.seen += 1
        if rule.seen <= rule.skip or (rule.times is not None and rule.hits >= rule.times):
            return False
        rule.hits += 1
        return True

    def hold(self, rule: Rule) -> None:
        """Block until the rule is released."""
        with self._changed:
            rule.waiting += 1
            self._changed.notify_all()
        rule.released.wait()
        with self._changed:
            rule.waiting -= 1
            self._changed.notify_all()

    def wait(self, rule_id: int, until: Callable[[Rule], bool], timeout: float) -> Rule:
        """The rule, once ``until`` holds of it; HubError 408 after ``timeout`` seconds."""
        with self._changed:
            rule = next((r for r in self._rules if r.id == rule_id), None)
            if rule is None:
                raise HubError(404, f"no fault rule {rule_id}")
            if not self._changed.wait_for(lambda: until(rule), timeout):
                raise HubError(408, f"fault rule {rule_id} did not get there in {timeout} s: {rule.describe()}")
            return rule
