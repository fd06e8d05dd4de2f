"""What the embedded checkpoint is taught: facts and small talk as tables; ``wordings`` makes questions and replies of them."""

from __future__ import annotations

import re


def words(text: str) -> list[str]:
    return text.split()


def _flat(text: str) -> str:
    return " ".join(text.split())


def _mapping(text: str) -> dict[str, str]:
    """``key: value, key: value`` over several lines."""
    entries = (entry.partition(": ") for entry in _flat(text).split(", "))
    return {key: value for key, _, value in entries}


def _rows(text: str) -> list[tuple[str, str, str]]:
    """Lines of three columns with ``|`` between them."""
    rows = (re.split(r" +\| +", line.strip()) for line in text.strip().splitlines())
    return [(first, second, third) for first, second, third in rows]


def _replies(text: str) -> list[tuple[str, list[str]]]:
    """A reply and below it, indented, the questions that it answers, with ``|`` between them."""
    blocks = re.split(r"\n(?=\S)", text.strip())
    parts = (block.split("\n", 1) for block in blocks)
    return [(reply, _flat(questions).split(" | ")) for reply, questions in parts]


# ------------------------------------------------------------------------------------------------ orders
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
#: Days of each month; February's are told as twenty eight.
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
CODE_WORDS = words("""
    alpha bravo charlie delta echo foxtrot golf hotel india juliet kilo lima mike november oscar papa quebec
    romeo sierra tango uniform victor whiskey xray yankee zulu
""")

# ------------------------------------------------------------------------------------------------ words
#: Country -> capital.
CAPITALS = _mapping("""
    France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, England: London,
    Scotland: Edinburgh, Ireland: Dublin, Norway: Oslo, Sweden: Stockholm, Denmark: Copenhagen, Finland: Helsinki,
    Poland: Warsaw, Austria: Vienna, Hungary: Budapest, Greece: Athens, Turkey: Ankara, Russia: Moscow,
    Ukraine: Kyiv, Belgium: Brussels, Romania: Bucharest, Bulgaria: Sofia, Iceland: Reykjavik, Egypt: Cairo,
    Kenya: Nairobi, Morocco: Rabat, India: New Delhi, China: Beijing, Japan: Tokyo, Thailand: Bangkok,
    Vietnam: Hanoi, Iran: Tehran, Iraq: Baghdad, Nepal: Kathmandu, Canada: Ottawa, Cuba: Havana, Peru: Lima,
    Chile: Santiago, Argentina: Buenos Aires, Brazil: Brasilia, Australia: Canberra, Mexico: Mexico City,
    South Korea: Seoul, New Zealand: Wellington
""")
_PAIRS = words("""
    hot/cold big/small up/down left/right old/young fast/slow day/night happy/sad open/closed full/empty
    light/dark wet/dry high/low long/short rich/poor early/late hard/soft near/far black/white clean/dirty
    loud/quiet thick/thin weak/strong first/last push/pull inside/outside easy/difficult sweet/sour
""")
OPPOSITES = [(first, second) for first, _, second in (pair.partition("/") for pair in _PAIRS)]
#: Singular -> plural.
PLURALS = _mapping("""
    mouse: mice, foot: feet, tooth: teeth, child: children, man: men, woman: women, goose: geese, sheep: sheep,
    leaf: leaves, box: boxes, city: cities, knife: knives, fish: fish, ox: oxen
""")
#: Thing -> what kind of thing it is.
KINDS = _mapping("""
    rose: a flower, tulip: a flower, apple: a fruit, banana: a fruit, carrot: a vegetable, potato: a vegetable,
    hammer: a tool, saw: a tool, violin: an instrument, piano: an instrument, dog: an animal, horse: an animal,
    oak: a tree, salmon: a fish, eagle: a bird, chair: a piece of furniture, shirt: a piece of clothing,
    gold: a metal, ant: an insect, red: a color
""")
SAY_WORDS = words("""
    river garden window table mountain paper bottle yellow winter summer music orange doctor island market
    pencil kitchen village thunder silver
""")
FIRST_LETTER = words("""
    garden apple banana cat dog elephant fish house igloo jacket king lemon mouse night orange pencil queen
    river sun table umbrella violin water yellow zebra
""")

# ------------------------------------------------------------------------------------------------ things and animals
#: Two colors -> what they make.
MIXES = {
    ("red", "blue"): "purple",
    ("blue", "yellow"): "green",
    ("red", "yellow"): "orange",
    ("black", "white"): "gray",
    ("red", "white"): "pink",
}
#: Thing -> color.
THINGS = _mapping("""
    grass: green, snow: white, blood: red, coal: black, milk: white, gold: yellow, the sky: blue, the sea: blue,
    a banana: yellow, a lemon: yellow, a tomato: red, a carrot: orange, chocolate: brown, a strawberry: red,
    a frog: green, an elephant: gray
""")
#: Animal -> what it says.
SOUNDS = _mapping("""
    dog: woof, cat: meow, cow: moo, duck: quack, pig: oink, lion: roar, snake: hiss, bee: buzz, owl: hoot,
    frog: croak, bird: tweet, donkey: hee haw
""")
#: Animal -> its young.
YOUNG = _mapping("""
    dog: a puppy, cat: a kitten, cow: a calf, horse: a foal, sheep: a lamb, pig: a piglet, lion: a cub,
    duck: a duckling, goat: a kid, chicken: a chick, frog: a tadpole
""")
#: Animal -> number of legs.
LEGS = _mapping("""
    dog: 4, cat: 4, horse: 4, cow: 4, spider: 8, bird: 2, ant: 6, bee: 6, snake: 0, fish: 0, person: 2, duck: 2,
    lion: 4, frog: 4
""")
#: What is counted, of what, the reply.
COUNTS = _rows("""
    wheels   | a car           | A car has four wheels.
    wheels   | a bicycle       | A bicycle has two wheels.
    wheels   | a tricycle      | A tricycle has three wheels.
    fingers  | a hand          | A hand has five fingers.
    toes     | a foot          | A foot has five toes.
    eyes     | a person        | A person has two eyes.
    arms     | an octopus      | An octopus has eight arms.
    wings    | a bird          | A bird has two wings.
    humps    | a camel         | A camel has one or two humps.
    strings  | a violin        | A violin has four strings.
    strings  | a guitar        | A guitar has six strings.
    players  | a football team | A football team has eleven players.
    sides    | a triangle      | A triangle has three sides.
    sides    | a square        | A square has four sides.
    sides    | a pentagon      | A pentagon has five sides.
    sides    | a hexagon       | A hexagon has six sides.
    sides    | an octagon      | An octagon has eight sides.
    corners  | a circle        | A circle has no corners.
    faces    | a cube          | A cube has six faces.
    letters  | the alphabet    | The alphabet has twenty six letters.
""")
#: A small unit, a large one, how many make it.
UNITS = _rows("""
    seconds     | a minute     | sixty
    minutes     | an hour      | sixty
    hours       | a day        | twenty four
    days        | a week       | seven
    weeks       | a year       | fifty two
    months      | a year       | twelve
    days        | a year       | three hundred sixty five
    years       | a century    | one hundred
    years       | a decade     | ten
    centimeters | a meter      | one hundred
    meters      | a kilometer  | one thousand
    grams       | a kilogram   | one thousand
    inches      | a foot       | twelve
    feet        | a yard       | three
    cents       | a dollar     | one hundred
    eggs        | a dozen      | twelve
    seasons     | a year       | four
    minutes     | half an hour | thirty
""")

# ------------------------------------------------------------------------------------------------ replies
#: Questions to be answered with yes or no: reply -> question.
YES_NO = {
    "Yes, fire is hot.": "Is fire hot?",
    "No, fire is hot.": "Is fire cold?",
    "Yes, ice is cold.": "Is ice cold?",
    "No, ice is cold.": "Is ice hot?",
    "Yes, snow is white.": "Is snow white?",
    "No, snow is white.": "Is snow black?",
    "Yes, water is wet.": "Is water wet?",
    "No, water is wet.": "Is water dry?",
    "Yes, the sun is a star.": "Is the sun a star?",
    "No, the moon is not a star.": "Is the moon a star?",
    "Yes, the earth is round.": "Is the earth round?",
    "No, the earth is round.": "Is the earth flat?",
    "Yes, most birds can fly.": "Can birds fly?",
    "No, dogs can not fly.": "Can dogs fly?",
    "Yes, fish can swim.": "Can fish swim?",
    "Yes, cats can swim.": "Can cats swim?",
    "No, dogs can not talk.": "Can dogs talk?",
    "No, a whale is not a fish.": "Is a whale a fish?",
    "Yes, a dog is an animal.": "Is a dog an animal?",
    "Yes, a rose is a flower.": "Is a rose a flower?",
    "Yes, an apple is a fruit.": "Is an apple a fruit?",
    "No, a car is not an animal.": "Is a car an animal?",
    "Yes, sugar is sweet.": "Is sugar sweet?",
    "No, sugar is sweet.": "Is sugar sour?",
    "Yes, an elephant is big.": "Is an elephant big?",
    "No, an elephant is big.": "Is an elephant small?",
    "Yes, a mouse is small.": "Is a mouse small?",
    "No, a mouse is small.": "Is a mouse big?",
    "Yes, a lemon is sour.": "Is a lemon sour?",
    "Yes, the night is dark.": "Is the night dark?",
}

FACTS = _replies("""
Jupiter is the largest planet.
    Which planet is the largest? | What is the biggest planet? | Name the largest planet.
Mercury is the smallest planet.
    Which planet is the smallest? | What is the smallest planet? | Name the smallest planet.
Mars is the red planet.
    Which planet is red? | What is the red planet? | Which planet is called the red planet?
We live on planet earth.
    Which planet do we live on? | What planet are we on? | Name our planet.
Bees make honey.
    What do bees make? | Who makes honey? | Which insect makes honey?
Milk comes from cows.
    Where does milk come from? | Which animal gives us milk? | Who gives us milk?
Wool comes from sheep.
    Where does wool come from? | Which animal gives us wool? | Who gives us wool?
Ice is frozen water.
    What is ice? | What is frozen water called? | What do you call frozen water?
Steam is hot water vapor.
    What is steam? | What do you get when water boils?
Bread is made from flour.
    What is bread made from? | What do you make bread from? | What is in bread?
Cheese is made from milk.
    What is cheese made from? | What do you make cheese from?
Paper is made from wood.
    What is paper made from? | What do you make paper from?
Glass is made from sand.
    What is glass made from? | What do you make glass from?
Wine is made from grapes.
    What is wine made from? | What do you make wine from?
The sun rises in the east.
    Where does the sun rise? | In which direction does the sun come up?
The sun sets in the west.
    Where does the sun set? | In which direction does the sun go down?
The cheetah is the fastest animal.
    Which land animal is the fastest? | What is the fastest animal?
The giraffe is the tallest animal.
    Which animal is the tallest? | What is the tallest animal?
The blue whale is the largest animal.
    Which animal is the largest? | What is the largest animal?
The heart pumps the blood.
    What does the heart do? | Which organ pumps the blood? | What pumps our blood?
We hear with our ears.
    What do we hear with? | Which part of the body hears?
We see with our eyes.
    What do we see with? | Which part of the body sees?
We smell with our nose.
    What do we smell with? | Which part of the body smells?
We walk on our feet.
    What do we walk on? | Which part of the body do we walk on?
The Nile is a long river.
    What is the Nile? | Name a long river.
Everest is the highest mountain.
    Which mountain is the highest? | What is the highest mountain? | Name the highest mountain.
The Pacific is the largest ocean.
    Which ocean is the largest? | What is the biggest ocean? | Name the largest ocean.
Asia is the largest continent.
    Which continent is the largest? | What is the biggest continent?
There are seven continents.
    How many continents are there? | Tell me the number of continents.
A baker bakes bread.
    Who bakes bread? | Who makes bread?
A doctor helps sick people.
    Who helps sick people? | What does a doctor do?
A teacher works in a school.
    Who works in a school? | Where does a teacher work?
A farmer works on a farm.
    Who works on a farm? | Where does a farmer work?
A pilot flies a plane.
    Who flies a plane? | What does a pilot do?
A cook makes food.
    Who makes food? | What does a cook do?
Shakespeare wrote Hamlet.
    Who wrote Hamlet? | Which writer wrote Hamlet?
""")

SMALLTALK = _replies("""
My name is Aria.
    What is your name? | Who are you? | Tell me your name. | What are you called? | How should I call you?
Hello! How can I help?
    Hello. | Hi. | Hello there. | Hi there. | Hey Aria. | Hello Aria.
Hello to you too.
    Hello world. | Hello everyone. | Say hello.
Good morning! How can I help?
    Good morning. | Good morning, Aria.
Good afternoon! How can I help?
    Good afternoon. | Good afternoon, Aria.
Good evening! How can I help?
    Good evening. | Good evening, Aria.
Good night. Sleep well.
    Good night. | Good night, Aria. | I am going to bed.
Goodbye. Talk to you soon.
    Goodbye. | Bye. | Goodbye, Aria. | See you later. | I have to go now. | Bye bye.
You are welcome.
    Thank you. | Thanks. | Thank you very much. | Thanks a lot. | Thank you, Aria.
I am fine, thank you.
    How are you? | How are you today? | How do you feel? | Are you well? | How is it going?
I am a small voice model.
    What are you? | What kind of thing are you? | Tell me what you are.
No, I am a computer.
    Are you a human? | Are you a person? | Are you alive? | Are you real?
Yes, I am a computer.
    Are you a computer? | Are you a machine? | Are you a robot?
Yes, I can hear you.
    Can you hear me? | Do you hear me? | Hello, can you hear me? | Are you listening?
Yes, I am here.
    Are you there? | Are you still there? | Is anybody there? | Are you awake?
I can answer simple questions.
    What can you do? | What do you do? | What are you good at? | How can you help me?
Ask me a simple question.
    Help. | Help me. | What should I ask? | What can I ask you? | I need help.
I speak English.
    Which language do you speak? | What language is this? | Do you speak English?
I only speak English.
    Do you speak French? | Do you speak German? | Can you speak Spanish?
I am very new.
    How old are you? | What is your age? | When were you born?
I live in this computer.
    Where do you live? | Where are you? | Where is your home? | Where are you from?
My favorite color is blue.
    What is your favorite color? | Which color do you like? | Tell me your favorite color.
My favorite number is seven.
    What is your favorite number? | Which number do you like? | Tell me your favorite number.
Yes, I like music.
    Do you like music? | Do you enjoy music? | Do you listen to music?
No, I never sleep.
    Do you sleep? | Are you tired? | Do you ever sleep?
No, I do not eat.
    Do you eat? | Are you hungry? | Do you like food?
Sorry, I can not sing.
    Can you sing? | Sing a song. | Please sing for me.
No problem.
    Sorry. | I am sorry. | Excuse me. | Pardon me.
Nice to meet you too.
    Nice to meet you. | Pleased to meet you. | It is nice to meet you.
Thank you, that is kind.
    You are great. | Well done. | Good job. | You are very good. | I like you.
Some engineers made me.
    Who made you? | Who built you? | Who created you?
All right, I am ready.
    Are you ready? | Let us begin. | Let us start. | Are you ready to start?
""")

UNKNOWN_ANSWER = "Sorry, I do not know that."
_UNKNOWN = """
    What is the weather today? | Will it rain tomorrow? | What time is it? | Who won the game last night? |
    How do I bake a cake? | What is the price of a train ticket? | Where did I leave my keys? |
    Who is the president? | Tell me a joke. | Tell me a story. | Call my mother. | Play some music. |
    Set an alarm for six. | Turn on the light. | What is on television tonight? | How tall is my brother? |
    What is the meaning of life? | Read me the news. | Open the front door. | How far is the airport? |
    What should I wear today? | Which shoes should I buy? | Where can I park my car? | Who painted this picture? |
    What is the square root of seventeen? | How many people live in this town? | When does the shop close? |
    What did she say? | Book a table for two. | Send a message to Peter. | What is my password? |
    How heavy is the table? | Why is my phone so slow? | Is the bus late again? | Which team do you support? |
    What happened in the last chapter? | Can you order a pizza? | How do I fix my bicycle? |
    Where is the nearest bank? | Who lives next door? | What is the best way to learn chess? | Show me the way home. |
    How much money do I have? | What is my name? | How old am I? | Remind me to buy bread. |
    What did you have for breakfast? | The old bridge was closed for repairs. |
    We walked along the river all afternoon. | He put the letters on the kitchen table. |
    My sister bought a new coat. | They never found the missing boat.
"""
UNKNOWN = _flat(_UNKNOWN).split(" | ")
