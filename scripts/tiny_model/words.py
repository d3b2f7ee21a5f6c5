"""The words and facts that the small model's training text is made of."""

_WORD_TEXT = """
    apple river stone lamp cloud tiger bread chair glass horse paper tree wind moon star sand
    boat fish bird house road hill lake rose leaf seed snow rain fire salt milk honey sugar
    table door window clock mirror basket bottle candle pencil letter book page song drum bell
    flute garden forest desert island ocean valley bridge tower castle market school bakery
    farm barn mill well gate wall roof floor carpet pillow blanket coat hat boot glove scarf
    ring crown sword shield arrow anchor rope sail wheel cart train plane rocket engine motor
    iron gold silver copper wood wool silk cotton rubber clay brick coal amber pearl ivory
    lemon grape peach plum cherry melon onion carrot pepper tomato potato bean corn rice wheat
    mouse rabbit fox wolf bear deer goat sheep cow pig duck goose swan eagle owl raven crab
    whale shark turtle frog snake spider ant bee moth king queen doctor pilot sailor farmer
"""
WORDS = tuple(_WORD_TEXT.split())
NAMES = ("Ana", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Hugo", "Iris", "Jack")
CITIES = ("Rome", "Paris", "London", "Berlin", "Madrid", "Tokyo", "Cairo", "Oslo", "Lima", "Delhi")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "orange")
WEATHER = ("sunny", "rainy", "cloudy", "windy", "foggy", "snowy")
_NUMBER_TEXT = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = tuple(_NUMBER_TEXT.split())
PROPERTIES = COLOURS + CITIES + NAMES + NUMBER_WORDS
"""What a list to remember says of its things. Disjoint from `WORDS`."""
_DAY_TEXT = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
DAYS = tuple(_DAY_TEXT.split())
_MONTH_TEXT = (
    "January February March April May June July August September October November December"
)
MONTHS = tuple(_MONTH_TEXT.split())

CAPITALS = {
    "Italy": "Rome",
    "France": "Paris",
    "England": "London",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Peru": "Lima",
    "India": "Delhi",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Sweden": "Stockholm",
    "Portugal": "Lisbon",
    "China": "Beijing",
    "Russia": "Moscow",
    "Ireland": "Dublin",
    "Cuba": "Havana",
    "Canada": "Ottawa",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "day": "night",
    "good": "bad",
    "old": "new",
    "open": "closed",
    "light": "dark",
    "high": "low",
    "long": "short",
    "happy": "sad",
    "wet": "dry",
    "full": "empty",
    "early": "late",
    "strong": "weak",
    "near": "far",
    "hard": "soft",
    "rich": "poor",
}
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "sheep": "baa",
    "duck": "quack",
    "pig": "oink",
    "bee": "buzz",
    "owl": "hoot",
}
LEGS = {"dog": 4, "cat": 4, "spider": 8, "ant": 6, "bird": 2, "fish": 0, "horse": 4, "bee": 6}
THING_COLOURS = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a tomato": "red",
    "a carrot": "orange",
    "chocolate": "brown",
}

SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hi", "hello", "Hey", "Hey!", "Hello there", "Hi there!"),
        "Hello! How can I help you?",
    ),
    (("Good morning", "Good morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!"), "Good evening! How can I help you?"),
    (
        (
            "Who are you?",
            "who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
        ),
        "I am a very small DeepSeek-V4.1 model, trained on simple tasks.",
    ),
    (
        ("What can you do?", "Help", "help", "How can you help me?", "What do you know?"),
        "I can add, sort, copy, remember lists, write JSON, call tools "
        "and answer simple questions.",
    ),
    (("How are you?", "How are you today?"), "I am fine, thank you."),
    (("Thank you", "Thanks", "Thanks!", "Thank you!", "thanks"), "You are welcome."),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you"), "Goodbye!"),
    (("Are you a human?", "Are you a person?"), "No, I am a small language model."),
    (
        ("Tell me a joke.", "Tell me a joke", "Make me laugh."),
        "Why did the model sleep? It was out of memory.",
    ),
    (
        (
            "What is the meaning of life?",
            "Who won the game?",
            "Write a poem.",
            "Write a story.",
            "What is love?",
            "What time is it?",
            "Explain gravity.",
            "Translate this.",
        ),
        "I do not know. I am a very small model.",
    ),
)
