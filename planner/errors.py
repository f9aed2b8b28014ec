"""What the planner refuses.

PlannerError
├── BadModel      a model description that cannot be built
├── BadCluster    a cluster description that cannot be built
├── BadLayout     a layout that this model and cluster cannot run; says the one reason
└── BadTable      a table or metrics file that cannot be read
"""

from __future__ import annotations


class PlannerError(ValueError):
    """Base of everything that the planner refuses. The message says what, found, and what to do."""


class BadModel(PlannerError):
    """A model description with a missing, unknown or impossible key."""


class BadCluster(PlannerError):
    """A cluster description with a missing, unknown or impossible key."""


class BadLayout(PlannerError):
    """A layout that cannot run."""


class BadTable(PlannerError):
    """A table of runs that cannot be read."""
