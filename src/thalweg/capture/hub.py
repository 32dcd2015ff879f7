"""A name on a hub: whether it can be reached, and at which commit; told in one line and within seconds."""

import logging
from dataclasses import dataclass

from thalweg.errors import InputError, OfflineError, first_line

TIMEOUT = 10.0  # seconds for the first answer of the hub


@dataclass(frozen=True)
class OnHub:
    """A repository of models: its name, and the commit to load; None where only what an earlier download left can be had."""

    name: str
    commit: str | None

    @property
    def options(self) -> dict:
        """For ``from_pretrained``."""
        return {"revision": self.commit} if self.commit else {"local_files_only": True}

    @property
    def note(self) -> str:
        return f"at hub commit {self.commit}" if self.commit else "from an earlier download; the hub was not asked"


def look_up(name: str, others: str, meant: str = "") -> OnHub:
    """The repository ``name``. others: what may be given instead. meant: what was perhaps meant.

    Raises: OfflineError where the hub cannot be reached and nothing is cached; InputError for a name that it does not show.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    logger = logging.getLogger("huggingface_hub")
    level, hint = logger.level, f"did you mean {meant!r}? " if meant else ""
    logger.setLevel(logging.CRITICAL)
    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set and nothing is cached")
        return OnHub(name, HfApi().model_info(name, timeout=TIMEOUT).sha)
    except HFValidationError:
        raise InputError(f"{name!r} is no folder here and cannot be a name on a hub; {hint}{others}") from None
    except Exception as error:  # the library and its transports raise many kinds
        if cached:
            return OnHub(name, None)
        if isinstance(error, RepositoryNotFoundError):
            raise InputError(
                f"{name} is no folder here, and the hub shows no model of that name to you; {hint}check the name, or log in; {others}"
            ) from None
        raise OfflineError(
            f"{name} is no folder here, and the hub did not give it ({first_line(error)}); {hint}check name and network, or {others}"
        ) from None
    finally:
        logger.setLevel(level)
