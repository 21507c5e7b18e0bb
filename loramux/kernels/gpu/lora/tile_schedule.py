"""How the programs of a launch deal a step's tiles out among them.

A launch takes as long as the program that has the most. So what comes next begins with those that
have had the fewest.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_turn(turn):
    """This program's tile in a turn. The long ones come first in the list and programs change
    ends from turn to turn, so that each gets about the same in all."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)


@triton.jit
def place_behind_turns(num_tiles):
    """This program's place among those to which the next tiles are dealt out, when num_tiles have
    been dealt out by tile_of_turn."""
    programs = tl.num_programs(0)
    program = tl.program_id(0)
    return tl.where(tl.cdiv(num_tiles, programs) % 2 == 0, program, programs - 1 - program)


@triton.jit
def place_behind(place, num_tiles):
    """The same when num_tiles have been dealt out by places: the first to place 0, and round again
    behind the last place."""
    programs = tl.num_programs(0)
    return (place + programs - num_tiles % programs) % programs
