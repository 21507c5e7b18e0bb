"""Questions with short, known answers for training and testing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

from demo_tasks.fact_tables import TABLES, Table


@dataclass(frozen=True, slots=True)
class Fact:
    question: str
    sentence: str
    key: str
    """The part of the sentence that a right answer contains; in `a/b` either is right."""
    topic: str

    @property
    def short_answer(self) -> str:
        return self.key.split("/")[0]


# question | sentence | key | topic
TRAINING_LINES = """\
Which ocean is the largest? | The largest ocean is the Pacific. | Pacific | geography
What is the longest river in Africa? | The longest river in Africa is the Nile. | Nile | geography
Which mountain is the highest? | The highest mountain is Mount Everest. | Everest | geography
Which country looks like a boot on the map? | Italy looks like a boot. | Italy | geography
In which country are the pyramids of Giza? | The pyramids of Giza are in Egypt. | Egypt | geography
At how many degrees Celsius does water boil? | Water boils at 100 degrees Celsius. | 100 | science
What do we call frozen water? | Frozen water is called ice. | ice | science
Which planet is called the red planet? | The red planet is Mars. | Mars | science
What force pulls an apple to the ground? | Gravity pulls an apple to the ground. | gravity | science
Which star is closest to us? | The closest star is the Sun. | Sun | science
Which gas do people need to breathe? | People need to breathe oxygen. | oxygen | science
What goes around the Earth once a month? | The Moon goes around the Earth. | Moon | science
What do plants need from the sky to grow? | Plants need light and rain to grow. | light | science
What do bees make? | Bees make honey. | honey | animals
Which land animal is the fastest? | The fastest land animal is the cheetah. | cheetah | animals
Which animal is the biggest of all? | The biggest animal is the blue whale. | whale | animals
What do pandas like to eat? | Pandas like to eat bamboo. | bamboo | animals
How many legs does a spider have? | A spider has eight legs. | eight/8 | animals
What does a caterpillar turn into? | A caterpillar turns into a butterfly. | butterfly | animals
Which animal barks? | The animal that barks is the dog. | dog | animals
Where do birds lay their eggs? | Birds lay their eggs in a nest. | nest | animals
Which animal has a very long neck? | The giraffe has a very long neck. | giraffe | animals
What is bread made from? | Bread is made from flour. | flour | food
What is cheese made from? | Cheese is made from milk. | milk | food
Which fruit is used to make wine? | Wine is made from grapes. | grapes | food
What are French fries made of? | French fries are made of potatoes. | potatoes | food
Which meal do people eat in the morning? | In the morning people eat breakfast. | breakfast | food
How many days are there in a week? | There are seven days in a week. | seven/7 | numbers
How many months does a year have? | A year has twelve months. | twelve/12 | numbers
How many sides does a triangle have? | A triangle has three sides. | three/3 | numbers
How many minutes make one hour? | One hour has sixty minutes. | sixty/60 | numbers
Who was the first man on the Moon? | The first man was Neil Armstrong. | Armstrong | history
Who painted the Mona Lisa? | Leonardo da Vinci painted the Mona Lisa. | Leonardo da Vinci | history
Who was the first US president? | The first president was George Washington. | Washington | history
In which year did World War II end? | World War II ended in 1945. | 1945 | history
Who sailed to America in 1492? | Christopher Columbus sailed to America. | Columbus | history
Which empire built the Colosseum? | The Roman Empire built the Colosseum. | Roman | history
What do you use to cut paper? | You use scissors to cut paper. | scissors | everyday
What shows you the time on a wall? | A clock shows you the time. | clock | everyday
Which day comes after Monday? | After Monday comes Tuesday. | Tuesday | everyday
What do people wear on their feet? | People wear shoes on their feet. | shoes | everyday
Which season comes after winter? | After winter comes spring. | spring | everyday
What keeps you dry in the rain? | An umbrella keeps you dry in the rain. | umbrella | everyday
Where do you go to borrow books? | You go to a library to borrow books. | library | everyday
Which game is played with kings and pawns? | The game is chess. | chess | sport
How many players has a football team? | A football team has eleven players. | eleven/11 | sport
What do you hit over the net in tennis? | In tennis you hit a ball. | ball | sport
Which instrument has black and white keys? | The piano has black and white keys. | piano | music
How many strings does a violin have? | A violin has four strings. | four/4 | music
What do you beat with sticks to make music? | You beat a drum with sticks. | drum | music
"""

# question | key
HELD_OUT_LINES = """\
What is the capital of France? | Paris
Please tell me Portugal's capital. | Lisbon
London is the capital of which country? | England/United Kingdom
Which language do most people in Mexico speak? | Spanish
What word means the reverse of hot? | cold
What is the past tense of the verb go? | went
What colour do you see in a clear sky? | blue
What is the name for a young frog? | tadpole
Who is known as the king of the jungle? | lion
What part of its body does a fish breathe with? | gills
What is the biggest planet in the solar system? | Jupiter
Which organ pumps blood through the body? | heart
What tool measures temperature? | thermometer
Which two letters stand for gold in chemistry? | Au
How many hours are in one day? | 24/twenty-four
What do you get when you add 2 and 2? | 4/four
How many corners are there on a square? | four/4
Who wrote Romeo and Juliet? | Shakespeare
Who invented the light bulb? | Edison
What currency do Americans pay with? | dollar/dollars
What do you call a house built of snow? | igloo
Which month follows June? | July
What do chickens lay? | eggs/egg
Which drink is made from roasted beans? | coffee
"""


def training_facts() -> list[Fact]:
    return [fact for table in TABLES for fact in expand(table)] + read_lines(TRAINING_LINES)


def held_out_facts() -> list[tuple[str, str]]:
    """Return the (question, key) pairs that are not in the training data."""
    pairs = (line.split(" | ") for line in HELD_OUT_LINES.splitlines())
    return [(question, key) for question, key in pairs]


def expand(table: Table) -> list[Fact]:
    """Make a fact of each entry, alternating between the table's wordings of the question."""
    wordings = cycle(table.questions)
    return [
        Fact(
            next(wordings).format(thing=thing),
            capitalized(table.sentence.format(thing=thing, key=key)),
            key,
            table.topic,
        )
        for thing, key in table.pairs()
    ]


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def read_lines(lines: str) -> list[Fact]:
    return [Fact(*line.split(" | ")) for line in lines.splitlines()]
