"""Words that the long-context tasks are made of: everyday English, listed for this package, and made-up words once these run out."""

from random import Random

from thalweg.errors import InputError

ADJECTIVES = """
able airy ample amber ancient arctic autumn azure bashful bitter blank blunt bold brave brief bright brisk broad bronze busy calm careful
cheerful chilly clean clever cloudy coastal cold cosy crimson crisp curious daring dapper deep distant dusty eager early earnest
eastern elegant empty faded faint famous fancy fearless fierce final firm flat fond formal fragile frank fresh friendly frosty gentle giant
glad gleaming golden graceful grand grateful green happy hardy hasty hazel hollow honest humble icy idle jolly keen kind large late lavish
lazy level light likely little lively lonely loud lucky mellow merry mighty mild modest muddy narrow neat nimble noble northern odd olive
open pale patient plain playful polite proud purple quaint quick quiet rapid rare ready royal rural rusty sandy scarlet secret shallow
sharp shiny shy silent silver simple sleepy slender smooth snowy sober solid sturdy subtle sunny sweet swift tall tame tender thirsty tidy
timid tiny tranquil upper urban useful vast velvet vivid warm wary western wild windy wise witty wooden young zealous
""".split()  # noqa: SIM905  # read as words

NOUNS = """
acorn anchor anvil apple apron arrow badger bakery balcony banjo barrel basin basket beacon beaver bell bench bicycle blanket boulder
bramble bridge broom bucket butter button cabin cactus camel candle canoe canyon carpet castle cellar cherry chimney clover coat cobbler
comet compass copper coral cottage cradle crane cricket crown curtain daisy desert dolphin donkey dragon drum eagle easel elbow ember
engine falcon feather fence ferry fiddle finch flute forest fossil fountain fox garden garlic gate glacier glove goblet goose granite
grape hammer harbour harvest hazelnut hedge helmet heron hill honey hornet island ivy jacket jar jasmine kettle kitten ladder lagoon
lantern leaf ledger lemon lighthouse lily linen lizard lobster locket magnet maple marble market meadow melon mill mirror mitten mole
monsoon moss motor mountain mushroom napkin needle nest oak oar ocean onion orchard otter oven owl paddle palace panther parrot pasture
pebble pelican pencil pepper piano pillow pine pocket pond poppy prairie puddle quarry quilt rabbit raven reed ribbon river robin rocket
rope saddle sail salmon scarf shovel shuttle sparrow spoon spruce stable stork summit sundial swallow tailor teapot temple thistle thunder
timber tower tractor trumpet tulip tunnel turnip valley violin wagon walnut walrus weaver whistle willow window winter wren yarn zebra
""".split()  # noqa: SIM905  # read as words

_ONSETS = "b br c cl d dr f fl g gr h j k l m n p pl pr qu r s sk sl sp st t tr v w z".split()  # noqa: SIM905
_VOWELS = "a e i o u ai ea oo".split()  # noqa: SIM905
_CODAS = "b ck d g l m n nd ng p rk rn rt s st t x".split()  # noqa: SIM905
KEYS = len(ADJECTIVES) * len(NOUNS)


def keys(rng: Random, count: int) -> list[str]:
    """Different adjective-noun pairs. Raises: InputError for more than there are."""
    if count > KEYS:
        raise InputError(f"{count:,} different keys are needed, there are {KEYS:,}; choose a smaller length")
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in rng.sample(range(KEYS), count)]


def numbers(rng: Random, count: int, digits: int = 7) -> list[str]:
    """Different numbers of so many digits."""
    return [str(n) for n in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def identifiers(rng: Random, count: int) -> list[str]:
    """Different identifiers of 32 hexadecimal digits in the groups of a UUID."""
    found: dict[str, None] = {}
    while len(found) < count:
        text = f"{rng.getrandbits(128):032x}"
        found["-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))] = None
    return list(found)


def single(rng: Random, count: int) -> list[str]:
    """Different single words: the listed ones in a random order, then made-up ones."""
    listed = sorted({*ADJECTIVES, *NOUNS})
    rng.shuffle(listed)
    found = dict.fromkeys(listed[:count])
    while len(found) < count:
        found[syllable(rng) + syllable(rng)] = None
    return list(found)


def syllable(rng: Random) -> str:
    """One made-up syllable."""
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


def letters(rng: Random, count: int, size: int, alphabet: str) -> list[str]:
    """Different strings of ``size`` letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(alphabet) for _ in range(size))] = None
    return list(found)
