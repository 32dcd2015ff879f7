"""The target of the entry point: importing it registers the connection."""

from thalweg.connections import register
from thalweg_braid.connection import Braid

register("braid", summary="four streams, mixed by a learned matrix at every site", source="made for the tests")(Braid)
