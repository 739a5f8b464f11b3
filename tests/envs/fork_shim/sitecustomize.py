"""On the path of an engine that needs no other shim."""

import forks

forks.instead_of_spawning()
