#include "texts.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace verkv::llm {

std::string TextRandom::uuid() {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (int i = 0; i < 32; ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    const std::size_t digit = below(16);
    if (i == 12) {
      text += '4';
    } else {
      text += digits[i == 16 ? 8 + digit % 4 : digit];
    }
  }
  return text;
}

namespace {

using Words = std::span<const std::string_view>;

// ---- Prose: the words. In braces: a person (A, B, C), a form of it (A.his), the town (T), the
// thing (O), a remembered event (M), or a list, whose entries may again hold braces.

constexpr std::string_view kMen[] = {
    "Tobias",   "Edmund",  "Jasper",   "Corin",   "Aldous",   "Matthias", "Rowan",   "Silas",
    "Hugh",     "Ambrose", "Lorenz",   "Piers",   "Gideon",   "Anselm",   "Barnaby", "Crispin",
    "Dorian",   "Emeric",  "Felix",    "Gervase", "Hamish",   "Isidor",   "Joachim", "Kester",
    "Leopold",  "Magnus",  "Nathan",   "Osbert",  "Percival", "Quentin",  "Rufus",   "Sebald",
    "Thaddeus", "Ulric",   "Valentin", "Wystan",  "Benedict", "Caspar",   "Damian",  "Everard"};
constexpr std::string_view kWomen[] = {
    "Mara",   "Agnes",    "Beatrix", "Clemence", "Dorothea", "Elspeth", "Frida",    "Greta",
    "Hester", "Ida",      "Johanna", "Katrin",   "Lavinia",  "Margery", "Nella",    "Odile",
    "Petra",  "Rosamund", "Sabine",  "Tamsin",   "Ursula",   "Verena",  "Winifred", "Ysolde",
    "Adela",  "Bridget",  "Cecily",  "Delphine", "Eleanor",  "Flora",   "Gisela",   "Harriet",
    "Isolde", "Judith",   "Linnet",  "Maud",     "Nora",     "Ottilie", "Philippa", "Rahel"};
constexpr std::string_view kFamilies[] = {
    "Venn",   "Harrow",   "Lindqvist", "Marsh",    "Talbot",  "Quill",   "Osterman", "Pell",
    "Rook",   "Sedgwick", "Thorne",    "Ulfers",   "Vance",   "Wexley",  "Abend",    "Brandt",
    "Carrow", "Dunmore",  "Eckhart",   "Fenwick",  "Garland", "Hollis",  "Ivers",    "Jessup",
    "Kettle", "Loxley",   "Merriman",  "Nettle",   "Oakes",   "Pomeroy", "Radcliff", "Stroud",
    "Tiller", "Underhay", "Verner",    "Whitlock", "Yarrow",  "Zeller",  "Ashdown",  "Bellamy",
    "Crane",  "Draper",   "Ellery",    "Foss",     "Gray",    "Hawkins", "Ingram",   "Joyce"};
constexpr std::string_view kTrades[] = {
    "glazier",     "cooper",     "clockmaker",      "ferryman",     "miller",
    "dyer",        "bookbinder", "surveyor",        "midwife",      "schoolmaster",
    "notary",      "weaver",     "tanner",          "bell founder", "salt merchant",
    "carter",      "physician",  "organist",        "locksmith",    "baker",
    "shipwright",  "printer",    "mapmaker",        "beekeeper",    "innkeeper",
    "quarryman",   "saddler",    "charcoal burner", "rope maker",   "candle maker",
    "toll keeper", "drover",     "potter",          "wheelwright",  "seed merchant",
    "lens grinder"};
constexpr std::string_view kTowns[] = {
    "Oldwick",   "Harrowgate",   "Saltmere",   "Brenford",   "Kessel",     "Thornbury Cross",
    "Lowmarsh",  "Vaudrey",      "Stanmouth",  "Greywater",  "Ellmoor",    "Ravensholt",
    "Pennick",   "Ostrava Mill", "Candleford", "Wintersend", "Marrow Bay", "Dunleath",
    "Fairhaven", "Highcombe",    "Tolver",     "Netherby",   "Quarne",     "Ashwater"};
constexpr std::string_view kRivers[] = {"the Lenn",  "the Orrow", "the Marl", "the Tessel",
                                        "the Avern", "the Brede", "the Kyle", "the Sorrel"};
constexpr std::string_view kLandmarks[] = {
    "the covered bridge",    "the corn exchange",  "the leaning bell tower",
    "the old customs house", "the almshouse",      "the walled orchard",
    "the stone granary",     "the lower lock",     "the chapel of Saint Orran",
    "the burned theatre",    "the horse market",   "the lighthouse stair",
    "the public baths",      "the tannery yard",   "the house with the green shutters",
    "the grammar school",    "the weighing house", "the north gate"};
constexpr std::string_view kMaterials[] = {"brass",  "silver",        "walnut", "ivory",  "copper",
                                           "pewter", "leather",       "oak",    "enamel", "iron",
                                           "ebony",  "tortoiseshell", "glass",  "cedar"};
constexpr std::string_view kThings[] = {
    "lantern",     "compass",   "writing desk", "music box", "signet",      "snuffbox",
    "telescope",   "mirror",    "chest",        "flute",     "key",         "sundial",
    "inkwell",     "chess set", "barometer",    "hand bell", "candlestick", "medallion",
    "violin case", "hourglass", "strongbox",    "sewing box"};
constexpr std::string_view kSeasons[] = {"spring", "summer", "autumn", "winter"};

constexpr std::string_view kWeather[] = {"the rain had not let up since Sunday",
                                         "a hard frost lay on the roofs",
                                         "the fog stood so thick that the boats kept to the bank",
                                         "the wind came off the hills and rattled every shutter",
                                         "the first warm air of the year moved through the lanes",
                                         "snow had closed the upper road",
                                         "thunder walked about beyond the ridge",
                                         "the heat had emptied the square",
                                         "a thin moon hung over {T.river}",
                                         "the swallows were gathering on the ropes",
                                         "the ice on {T.river} had begun to crack",
                                         "dust from the threshing hung in the light",
                                         "the lamps were already lit at four",
                                         "the apples had come early and were rotting in the grass"};
constexpr std::string_view kFeelings[] = {"relief",
                                          "shame",
                                          "a stubborn kind of hope",
                                          "envy",
                                          "tenderness",
                                          "anger that surprised {A.him}",
                                          "something close to grief",
                                          "plain curiosity",
                                          "the old restlessness",
                                          "pride",
                                          "suspicion",
                                          "an unreasonable happiness",
                                          "weariness",
                                          "dread"};
constexpr std::string_view kGoods[] = {
    "barrels of herring",    "bales of grey wool", "sacks of barley",  "crates of window glass",
    "casks of cider",        "bundles of willow",  "jars of lamp oil", "rolls of sailcloth",
    "baskets of eels",       "loads of lime",      "boxes of type",    "hides",
    "wheels of hard cheese", "lengths of rope"};
constexpr std::string_view kFood[] = {"cold mutton",
                                      "bread and onions",
                                      "a soup of leeks",
                                      "smoked trout",
                                      "pears in wine",
                                      "yesterday's porridge",
                                      "a pie that nobody had ordered",
                                      "salted beans",
                                      "honey cake",
                                      "eggs fried in lard",
                                      "a thin stew",
                                      "chestnuts"};
constexpr std::string_view kSounds[] = {"a cart with a loose wheel",
                                        "someone practising scales",
                                        "the watchman counting the hour",
                                        "two dogs disputing a bone",
                                        "hammering from the yard",
                                        "a child reciting the kings",
                                        "geese going over",
                                        "water in the pipes",
                                        "the shutters of the bakery",
                                        "a bell that was slightly flat"};
constexpr std::string_view kRooms[] = {
    "the back kitchen", "the counting room", "the loft above the stable",
    "the parlour",      "the workshop",      "the vestry",
    "the cellar",       "the reading room",  "the gallery over the stairs",
    "the laundry",      "the upper bedroom", "the narrow office beside the gate"};
constexpr std::string_view kSubjects[] = {"the price of salt",
                                          "the repair of the weir",
                                          "the new tax on windows",
                                          "a lawsuit over a hedge",
                                          "the sickness among the cattle",
                                          "the election of the wardens",
                                          "the missing parish register",
                                          "the road to the coast",
                                          "the school fees",
                                          "a wreck on the sandbank",
                                          "the will of a distant aunt",
                                          "the quality of the flour",
                                          "the comet",
                                          "the wages of the ferrymen",
                                          "the flood of the old days",
                                          "a rumour of war",
                                          "the cracked bell",
                                          "the theft at the weighing house"};
constexpr std::string_view kSums[] = {"eleven crowns",
                                      "forty marks",
                                      "a purse of foreign silver",
                                      "six crowns and a promise",
                                      "ninety marks",
                                      "two months' wages",
                                      "three crowns",
                                      "the price of a good horse",
                                      "seventeen crowns",
                                      "less than it was worth",
                                      "a hundred and twenty marks",
                                      "a single gold coin"};
constexpr std::string_view kTasks[] = {"mend the sluice",
                                       "copy out the accounts",
                                       "find the missing register",
                                       "plant the lower field",
                                       "rebuild the chimney",
                                       "teach the child to read",
                                       "carry the papers over the pass",
                                       "settle the quarrel about the hedge",
                                       "recast the cracked bell",
                                       "sell the mare",
                                       "draw a true map of the marsh",
                                       "take in the orphan from the mill",
                                       "clear the name of the family",
                                       "write to the bishop",
                                       "drain the meadow",
                                       "set the clock right"};
constexpr std::string_view kHabits[] = {"counted stairs without knowing it",
                                        "kept string in every pocket",
                                        "never sat with {A.his} back to a door",
                                        "read the same almanac every night",
                                        "whistled when lying",
                                        "gave nicknames to horses",
                                        "walked to {T.river} before breakfast in all weathers",
                                        "could not pass a clock without correcting it",
                                        "wrote the date on everything",
                                        "ate standing up",
                                        "fed the sparrows and denied it",
                                        "remembered voices better than faces",
                                        "collected proverbs and disagreed with them",
                                        "spoke to strangers more easily than to kin"};
constexpr std::string_view kLooks[] = {"a long, patient face",
                                       "hands scarred by the trade",
                                       "hair that had gone white in one night",
                                       "a limp from a fall off a ladder",
                                       "pale eyes that missed little",
                                       "a voice too large for any room",
                                       "a burn on the left wrist",
                                       "the broad shoulders of the whole family",
                                       "spectacles mended with thread",
                                       "a coat two sizes too wide",
                                       "a laugh that came late",
                                       "the look of someone listening for a carriage"};
constexpr std::string_view kOaths[] = {
    "on {A.his} mother's grave",  "before two witnesses",
    "with a hand on the table",   "in writing",
    "without being asked",        "for the third time",
    "under the arch of {T.mark}", "quietly, so that nobody else heard"};
constexpr std::string_view kTimes[] = {"before dawn",
                                       "at noon",
                                       "towards evening",
                                       "after the second bell",
                                       "on market day",
                                       "the following Tuesday",
                                       "late that night",
                                       "when the church emptied",
                                       "on the eve of the fair",
                                       "three days later",
                                       "before the week was out",
                                       "at the turn of the month"};
constexpr std::string_view kManner[] = {"slowly",
                                        "with great care",
                                        "as if reading aloud",
                                        "without looking up",
                                        "almost kindly",
                                        "too quickly",
                                        "in a low voice",
                                        "with a shrug",
                                        "after a long pause",
                                        "smiling at last",
                                        "like a clerk",
                                        "through the half-open door"};
constexpr std::string_view kNumbers[] = {"two",    "three",    "four",   "five",
                                         "six",    "seven",    "nine",   "eleven",
                                         "twelve", "fourteen", "twenty", "thirty"};

constexpr std::string_view kAdjectives[] = {
    "narrow",    "crooked",     "freshly painted", "rusty",     "heavy",      "unfinished",
    "borrowed",  "faded",       "broken",          "polished",  "half-empty", "foreign",
    "damp",      "nameless",    "handsome",        "worthless", "forgotten",  "singed",
    "patched",   "sealed",      "square",          "hollow",    "tilted",     "dusty",
    "gilded",    "plain",       "stolen",          "frozen",    "bitter",     "crowded",
    "quiet",     "steep",       "yellow",          "blackened", "silent",     "unlucky",
    "enormous",  "delicate",    "scratched",       "sturdy",    "soft",       "grey",
    "bright",    "ragged",      "secret",          "torn",      "shallow",    "tall",
    "neglected", "second-hand", "weathered",       "spotless",  "clumsy",     "expensive",
    "cheap",     "familiar",    "peculiar"};
constexpr std::string_view kNouns[] = {
    "ladder",   "stove",     "ledger",   "doorway", "barrel", "kettle", "fence",    "saddle",
    "portrait", "staircase", "well",     "curtain", "boat",   "plough", "bench",    "cradle",
    "chimney",  "map",       "wheel",    "hedge",   "pump",   "basket", "coat",     "loom",
    "gate",     "clock",     "cart",     "drawer",  "stone",  "boot",   "lamp",     "window",
    "bridge",   "rope",      "envelope", "bottle",  "table",  "bell",   "cupboard", "candle",
    "hatch",    "almanac",   "anvil",    "piano",   "crate",  "barn",   "oar",      "shelf",
    "hammer",   "net",       "fiddle",   "mule",    "goose",  "path",   "wall",     "umbrella",
    "trunk",    "calendar",  "stool",    "pear",    "oven",   "book",   "apron",    "coin"};
constexpr std::string_view kVerbs[] = {
    "examined",        "repaired",   "carried off", "cursed",     "measured",
    "painted",         "forgot",     "praised",     "hid",        "walked around",
    "dreamed of",      "paid for",   "described",   "pointed at", "leaned against",
    "laughed at",      "ruined",     "cleaned",     "sketched",   "asked for",
    "refused",         "remembered", "looked past", "inherited",  "kicked",
    "admired",         "moved",      "covered",     "weighed",    "complained about",
    "sat down beside", "stared at"};

constexpr std::string_view kOpenings[] = {
    "{time} {A} came to {T}, where {weather}.",
    "In {T} that {season} {weather}, and {A} was glad of any errand that led indoors.",
    "{A} the {A.trade} had business at {T.mark}, and it could not wait.",
    "The {season} of {year} began badly for {A}.",
    "Nobody in {T} could say later who had seen {A} first.",
    "There was a table in {room} at which {A} and {B} had settled most things between them.",
    "{weather}, and the carriers brought {number} {goods} into {T} before the road closed.",
    "When {A} opened the door of {room}, {B} was already there, eating {food}.",
    "All through the {season} the talk in {T} was of {subject}.",
    "{A} had slept badly and went out {time} to look at {T.river}.",
    "It was {A.kin} who brought the news to {T}.",
    "For {number} weeks {A} said nothing about {subject}.",
    "The letter from {B} lay unopened in {room} for {number} days.",
    "They met at {T.mark}, since {weather} and no other roof was near.",
    "On the day of the fair {A} wore the good coat and carried {O} under it.",
    "People who knew {A} only as a {A.trade} were surprised by what happened in {T} that {season}.",
    "{B} sent word {time} that {A} was wanted at {T.mark}.",
    "Between {T.mark} and {T.river} there is a lane without a name, and there {A} waited for {B}.",
    "The accounts of the {A.trade} show a gap in the {season} of {year}, and this is the reason "
    "for it.",
    "Not long after the business about {subject}, {A} crossed {T.river} again."};

constexpr std::string_view kFillers[] = {
    "From outside came the noise of {sound}.",
    "{A} felt {feeling}, and hid it by asking about {subject}.",
    "{B} listened {manner} and then spoke of {subject}.",
    "Between them on the sill stood {O}, which neither of them touched.",
    "{A.He} was a {A.trade}, after all, and knew what such a thing cost.",
    "{A} counted {number} {goods} and wrote the figure down twice.",
    "There was {food} on the table, but {B} only drank.",
    "{A.kin} had warned {A.him} about exactly this.",
    "The matter of {subject} was mentioned, and dropped again.",
    "{B} had a way of answering a question with another, and did so now.",
    "Whoever has lived in {T} knows how far a word travels from {T.mark}.",
    "{A} thought of {A.town} and of the house there, with its smell of {food}.",
    "It took {number} days to learn what everyone at {T.mark} had known from the start.",
    "{C} passed by the window, saw them both, and walked on.",
    "In {room} the clock had stopped, and nobody wound it.",
    "{A} {A.habit}, and {B} had learned to wait until it was over.",
    "The price was {sum}, which was too much, and {A} paid it.",
    "{B}, who was a {B.trade} and proud of it, saw the flaw at once.",
    "They walked as far as {T.river} without agreeing on anything.",
    "Somebody had chalked a number on the door of {room}.",
    "{A} asked for {number} more days, and got two.",
    "What {B} wanted was not the money but an apology.",
    "Half of {T} owed something to {C}, and the other half pretended not to.",
    "{A.He} looked at {O} for a long time, as one looks at a map of a country already left.",
    "A boy ran in with a message from {C} and would not leave without a coin.",
    "{weather}, so they stayed where they were and talked of {subject}.",
    "{B} laughed {manner}, and the laugh did more harm than the words.",
    "The {season} rents were due, and that explained a good deal.",
    "{A} had {A.look}, and strangers tended to trust {A.him} for it.",
    "Nothing in the papers contradicted this, yet {A} was not satisfied.",
    "{B.kin} would have managed it better, as {B} well knew.",
    "It was said that {C} had seen {O} in another house, and in other hands.",
    "{A} offered to {task}, and meant it at the time.",
    "In the end they drew lots with straws, and {B} drew the short one.",
    "A line in the register of {T} gives the date and nothing else.",
    "{A} remembered every word of it in the years to come, and {B} remembered none.",
    "The dog knew before they did, and went to lie under the stairs.",
    "Under the floor of {room} they found only dust, and a button.",
    "{C} maintained to the end that the whole affair was about {subject}.",
    "The carrier asked {sum} for the journey, and would take no less.",
    "{B} folded the paper {manner} and put it behind {O}.",
    "Where the road bends towards {A.town}, {A} turned and looked back.",
    "The wardens sat for {number} hours and decided to sit again.",
    "{A} would rather have gone to {task}, and said so.",
    "Of the {number} {goods} only half arrived, and those were wet.",
    "{B} spoke the names of the dead in order, the way it is done in {B.town}.",
    "Every {A.trade} in the district had an opinion, and none of them agreed.",
    "{A} said that {A.he} would think about it, which in {T} means no.",
    "The candle was down to its end when {C} finally knocked.",
    "With {sum} one could have bought the field, the barn and the goodwill of {C} besides.",
    "{A.He} had been told as a child that {O} would bring no luck to anyone.",
    "{B} had never once been late, and was late now.",
    "Of the two roads they took the longer, because of what had happened at {T.mark}.",
    "Through the wall one could hear {sound}, and somebody weeping or laughing.",
    "{C} the {C.trade} was asked for an opinion and gave three.",
    "If {A} was afraid, it showed only in the way {A.he} held the cup.",
    "The rest of the evening went by with {food} and old stories about {subject}.",
    "{B} had promised {oath} to {task}, and the whole street had heard it.",
    "A stranger would have noticed only two people bent over {O}.",
    "On the table lay a {adj} {noun}, a {adj} {noun} and what was left of {food}.",
    "{A} {did} the {adj} {noun} and then, {manner}, the {noun} beside it.",
    "A {adj} {noun} is no proof of anything, but {B} {did} it all the same.",
    "There had been a {noun} in this place once, as {adj} as the one in {A.town}.",
    "{B} described a {adj} {noun} that stood behind {T.mark} when {B.he} was a child.",
    "\"A {noun} is a {noun},\" {A.kin} liked to say, and {A} had never understood it.",
    "The {trade} next door {did} the {noun} every morning and the {noun} every night.",
    "{A} wanted nothing more than a {adj} {noun} and {number} hours of sleep.",
    "In exchange {B} asked for the {adj} {noun}, another {noun} and a day's work.",
    "Of all that was sold that {season}, the {adj} {noun} brought the most.",
    "It was neither the {noun} nor the {noun} that troubled {A}, but {subject}.",
    "{C} came in, {did} the {noun}, and asked whether anyone had seen a {adj} {noun}.",
    "They had to pass a {adj} {noun}, a {adj} {noun} and the dog of the {trade}.",
    "What {A} took for a {noun} in the dark was only a {adj} {noun}.",
    "{B} drew a {noun} in the dust, and beside it a much larger {noun}.",
    "Since the {season} the {noun} had been {adj}, and nobody could say why.",
    "{number} people claimed the {adj} {noun}, and {B} {did} it while they argued.",
    "{A} compared the {noun} with the {noun} and found both of them {adj}.",
    "The smell of {food} came from behind the {adj} {noun}.",
    "For the {noun} {A} had paid {sum}, for the {noun} nothing.",
    "{A} knew the handwriting, though it was {number} years since {A.he} had seen it."};

// Two clauses in one sentence.
constexpr std::string_view kJoins[] = {
    "{clause}, and {clause}.",
    "{clause}, but {clause}.",
    "Although {clause}, {clause}.",
    "Before {clause}, {clause}.",
    "{clause}, and that was {time}; {clause}.",
    "It hardly mattered that {clause}, since {clause}.",
    "{clause}, for {clause}.",
    "Because {clause}, {clause}, and {C} saw it.",
    "While {clause}, {clause}.",
    "{clause}, or so {C} said, and then {clause}.",
    "If {clause}, it was because {clause}.",
    "{time} {clause}, and afterwards {clause}.",
    "{clause}, which would have been nothing, except that {clause}.",
    "Nobody asked why {clause}, because {clause}."};
constexpr std::string_view kClauses[] = {"{A} locked {room}",
                                         "{B} took the road to {A.town}",
                                         "nobody mentioned {subject}",
                                         "{A} had {sum} in {A.his} pocket",
                                         "{B} was thinking of {subject}",
                                         "{C} had left for {T}",
                                         "{weather}",
                                         "{number} {goods} stood in the yard",
                                         "{A} tasted {food}",
                                         "{B} knew the value of {O}",
                                         "{A} spoke {manner}",
                                         "{B} wanted to {task}",
                                         "{C} had a cousin in {B.town}",
                                         "the bell of {T} rang {number} times",
                                         "{A} dreamed of {T.river}",
                                         "{sound} could be heard",
                                         "{B} forgot the key of {room}",
                                         "{A} meant to {task}",
                                         "{A} showed {O} to a {trade}",
                                         "{owner} asked after {O}",
                                         "a {trade} from {C.town} had offered {sum}",
                                         "the wardens argued about {subject}",
                                         "{A} was tired of {food}",
                                         "{B} stood by {T.mark} {time}",
                                         "{A} owed {number} weeks of rent",
                                         "{B} had not seen {A.town} for {number} years",
                                         "the road past {T.mark} was flooded",
                                         "{A.kin} expected {A.him} {time}",
                                         "{B.kin} sent {goods}",
                                         "{A} read aloud from the almanac",
                                         "{C} kept {number} geese behind {T.mark}",
                                         "{A} {did} the {adj} {noun}",
                                         "{B} {did} the {adj} {noun}",
                                         "{C} {did} the {noun} near {T.mark}",
                                         "{A} {did} a {noun} that belonged to {C}",
                                         "the {noun} was {adj}",
                                         "a {adj} {noun} blocked the way",
                                         "{B} {did} the {noun} {manner}",
                                         "{A} {did} the {noun} {time}",
                                         "somebody {did} the {adj} {noun}",
                                         "the {noun} of {C} was {adj}",
                                         "{A.kin} {did} the {adj} {noun}",
                                         "{B} offered {sum} for a {adj} {noun}",
                                         "the {noun} smelled of {food}",
                                         "a {trade} {did} the {noun} and the {noun}"};

constexpr std::string_view kClosings[] = {
    "After that {A} went home to {A.town} and slept until noon.",
    "{B} never spoke of it in {T} again.",
    "So it was left, and so it stayed until the {season}.",
    "By the time {weather}, both of them had changed their minds.",
    "The door closed, and {A} was alone with {O}.",
    "This was how {A} came to be in debt to {B}, and not only in money.",
    "They parted at {T.mark} without shaking hands.",
    "Later {C} would claim to have arranged everything.",
    "It cost {A} {sum}, and {A.he} thought it cheap.",
    "In {T} the story is still told, but with other names.",
    "{A} wrote it down the same night, and the page has been kept.",
    "Only {A.kin} understood what had been lost.",
    "What {B} felt was {feeling}, although {B.he} would have called it something else.",
    "And {T.river} went on under the bridge as if none of it mattered.",
    "The next morning {A} began to {task}.",
    "It was the last time that {A}, {B} and {C} were all in one room."};

// What a person does, in the simple past and as a participle, and what the world keeps of it.
enum class Effect { none, give_thing, take_thing, move, marry, quarrel, debt, repay };
struct Deed {
  std::string_view past;
  std::string_view participle;
  Effect effect;
};
constexpr Deed kDeeds[] = {
    {"sold {O} to {B} for {sum}", "sold {O} to {B}", Effect::give_thing},
    {"gave {O} into the keeping of {B}", "given {O} into the keeping of {B}", Effect::give_thing},
    {"lost {O} to {B} at cards", "lost {O} to {B} at cards", Effect::give_thing},
    {"pawned {O}, and {B} redeemed it for {sum}", "pawned {O} and let {B} redeem it",
     Effect::give_thing},
    {"bought {O} back for {sum}", "bought back {O}", Effect::take_thing},
    {"found {O} behind the panelling of {room}", "found {O} behind the panelling",
     Effect::take_thing},
    {"won {O} in a wager about {subject}", "won {O} in a wager", Effect::take_thing},
    {"left the old house and moved to {T}", "moved to {T}", Effect::move},
    {"took over a workshop near {T.mark} and stayed in {T} for good", "settled in {T}",
     Effect::move},
    {"married {B} in the chapel by {T.river}", "married {B}", Effect::marry},
    {"quarrelled with {B} over {subject}", "quarrelled with {B} over {subject}", Effect::quarrel},
    {"accused {B} before the wardens of {T}", "accused {B} before the wardens", Effect::quarrel},
    {"refused to sit at one table with {B}", "refused to sit at one table with {B}",
     Effect::quarrel},
    {"borrowed {sum} from {B}", "borrowed money from {B}", Effect::debt},
    {"signed a bond for {sum} in favour of {B}", "signed a bond in favour of {B}", Effect::debt},
    {"paid {B} the last of the debt", "paid the last of the debt to {B}", Effect::repay},
    {"told {B} the truth about {subject}", "told {B} the truth about {subject}", Effect::none},
    {"promised {B} {oath} to {task}", "promised {B} to {task}", Effect::none},
    {"nursed {B} through a fever of {number} days", "nursed {B} through the fever", Effect::none},
    {"pulled {B} out of {T.river}", "pulled {B} out of {T.river}", Effect::none},
    {"hid a letter from {B} inside {O}", "hidden the letter from {B} inside {O}", Effect::none},
    {"taught {B} the first rules of the trade", "taught {B} the rules of the trade", Effect::none},
    {"gave false witness for {B} about {subject}", "given false witness for {B}", Effect::none},
    {"set out with {B} to {task}", "set out with {B} to {task}", Effect::none},
    {"refused {B} the use of {room}", "refused {B} the use of {room}", Effect::none},
    {"showed {B} the way across the marsh", "shown {B} the way across the marsh", Effect::none},
    {"broke a window of {T.mark} and let {C} be blamed", "let {C} be blamed for the window",
     Effect::none},
    {"delivered {number} {goods} to {B} and was never paid", "delivered {goods} to {B} unpaid",
     Effect::none}};
constexpr std::string_view kDeedFrames[] = {
    "{time} {A} {deed}.",
    "In the end {A} {deed}.",
    "That was the {season} in which {A} {deed}.",
    "To everyone's surprise {A} {deed}, and {C} was there to see it.",
    "While {C} was away, {A} {deed}.",
    "{A} {deed}, and told nobody but {A.kin}.",
    "It was in {room} that {A} {deed}.",
    "Because of {subject}, or so it was put about, {A} {deed}.",
    "Without a word to {A.kin}, {A} {deed}."};

constexpr std::string_view kMemories[] = {
    "{A} had not forgotten that {M} {when}.",
    "Everyone present knew that {M} {when}.",
    "Ever since {M} {when}, there had been a coolness between the houses.",
    "It was well known in {T} that {M} {when}.",
    "If it was true that {M} {when}, then {B} owed {A} an explanation.",
    "As {A} had told {C} long before, it all began when {M} {when}.",
    "That {M} {when} was the one thing {B} would not discuss.",
    "{C} reminded them both that {M} {when}.",
    "There would have been no dispute at all but for what happened {when}, when {M}.",
    "{A} turned over in {A.his} mind how {M} {when}, and what had come of it.",
    "The older people dated things from the day when {M}, and that was {when}.",
    "It had been different {when}, before {M}.",
    "Only now did {A} understand why {M} {when}.",
    "In the margin of the ledger {B} had noted that {M} {when}.",
    "Some said it was a judgement, because {M} {when}.",
    "{B} asked whether it was really so that {M} {when}, and {A} nodded."};
constexpr std::string_view kThingMemories[] = {
    "{O} belonged to {owner} now, and {A} could not look at it without thinking so.",
    "It was no secret that {O} stood in the house of {owner}.",
    "{A} would have given {sum} to know how {O} had come into the hands of {owner}.",
    "{owner} kept {O} in {room}, wrapped in a cloth.",
    "Whatever else had changed, {O} was still with {owner}.",
    "On the inside of {O} somebody had scratched the name of {T}, and below it the name of "
    "{owner}."};

constexpr std::string_view kQuestions[] = {
    "Do you still have {O}",
    "Is it true that {M} {when}",
    "What did {C} want from you",
    "How long do you mean to stay in {T}",
    "Who told you about {subject}",
    "Would you {task} for {sum}",
    "When did you last see {C}",
    "Have you eaten anything since {T.mark}",
    "Why did you come here {time}",
    "You remember, do you not, how {M} {when}",
    "And if {C} refuses",
    "Did you know that {owner} has {O} now",
    "What is a {B.trade} doing with {number} {goods}",
    "Can you keep a thing to yourself",
    "Shall I write to {C}, or will you",
    "Who {did} the {adj} {noun}",
    "Where is the {noun} from {T.mark}",
    "Why is the {noun} so {adj}",
    "Would {C} take a {noun} for the {adj} {noun}",
    "Have you heard what the {trade} says about the {adj} {noun}"};
constexpr std::string_view kAnswers[] = {
    "I know only that {M} {when}",
    "You would have to ask {owner}, who has {O}",
    "Nothing that {C} says about {subject} is worth {sum}",
    "I gave my word to {task}, and I shall keep it",
    "It was different {when}",
    "I was in {room} the whole time, and {C} can swear to it",
    "My father was a {B.trade} before me, and he never asked such questions",
    "They are saying it all over {T}",
    "Not until the {season}, and not for less than {sum}",
    "I saw {C} by {T.river}, and that is all I saw",
    "There were {number} of them, and they had {goods} with them",
    "You were always better at {subject} than I was",
    "I would rather {task} than talk about it",
    "Because {M} {when}, and you know what followed",
    "It is late, and there is still {food}",
    "Nobody believes that any more, not even {C}",
    "Take it or leave it",
    "Then we have both been lied to",
    "I kept the letter, if that is what you mean",
    "It is only a {adj} {noun}, and you know it",
    "The {trade} {did} the {noun}, and nobody stopped him",
    "I have a {noun}, a {adj} {noun} and no money at all",
    "First the {noun}, then the {adj} {noun}, and then we shall see",
    "{C} {did} it, behind the {adj} {noun}",
    "Not for {sum}, and not for a {adj} {noun} either",
    "Because the {noun} was {adj}",
    "Ask me again in the {season}"};
constexpr std::string_view kStatements[] = {
    "{C} will be here before the {season}",
    "I have found out who was at {T.mark}",
    "We cannot pay {sum}, and {C} knows it",
    "This is about {subject}, it was never about {O}",
    "I am leaving {T} {time}",
    "Somebody has been in {room}",
    "{M}, and I can prove it",
    "The {goods} never came",
    "There is a {adj} {noun} in {room}",
    "{C} {did} our {noun}",
    "The {noun} you sold me is {adj}",
    "I have seen a {adj} {noun} in the house of {C}",
    "We shall need a {noun}, a {noun} and something {adj}",
    "I dreamed of {T.river} again",
    "You owe {C} an answer",
    "I have decided to {task}",
    "They want a {A.trade} in {A.town}, and I have said yes"};
constexpr std::string_view kSpeaking[] = {"said",    "said",     "said",     "answered",
                                          "replied", "murmured", "remarked", "put in"};
constexpr std::string_view kBeats[] = {
    "{A} looked towards {T.mark}.",        "{B} moved {O} a little to the left.",
    "For a while there was only {sound}.", "{A} said nothing to that.",
    "{B} cut the bread {manner}.",         "Somewhere below a door was shut.",
    "{A} began to laugh and stopped.",     "{B} read the paper once more."};

constexpr std::string_view kLetterOpenings[] = {
    "I have your lines of the {season} and answer them late, because {weather}.",
    "You will have heard by now that {M} {when}.",
    "Forgive the paper; in {T} there is no better to be had for {sum}.",
    "I write this in {room}, with {sound} for company.",
    "It is {number} weeks since I left {T}, and nobody here speaks of {subject}.",
    "{C} brought me your letter, and stayed for {food}."};
constexpr std::string_view kLetterBodies[] = {
    "Tell {C} that I have not forgotten {subject}.",
    "What became of {O}, which I last saw with {owner}.",
    "I can send {number} {goods} by the next carrier, if you will pay him.",
    "As to what you ask, I was there when {M}, and it was not as {C} tells it.",
    "The work of a {A.trade} is the same everywhere, only the bread is different.",
    "Here they offered me {sum} to {task}, and I am tempted.",
    "Do not let {C} into {room} until I am back.",
    "The {adj} {noun} arrived safely, the {noun} did not.",
    "Yesterday a {trade} {did} my {noun}, and I had to laugh.",
    "I have bought a {adj} {noun} and sold the {noun} you disliked.",
    "They have a {noun} here that is as {adj} as ours.",
    "I think often of the day when {M}.",
    "My cough is better, though {weather}.",
    "If you pass {T.mark}, look whether my name is still on the wall.",
    "You were right about {C}, and I should have listened {when}.",
    "There is a lens grinder in this street who knew your mother.",
    "{A.kin} has written as well, and the two accounts do not agree.",
    "Burn this, or better, keep it behind {O}."};

constexpr std::string_view kTownSentences[] = {
    "{T} lies on {T.river}, a day's walk from anywhere that matters.",
    "Strangers are shown {T.mark}, and after that there is little left to show.",
    "The people of {T} live from {goods} and from lending money to one another.",
    "Its market is held {time}, and {number} villages come to it.",
    "In the {season} {T.river} rises into the cellars, and the cats move upstairs.",
    "There are {number} inns, of which one is honest.",
    "Most of what is told here happened within sight of {T.mark}.",
    "{C} was born in {C.town} but is counted as one of their own in {T}.",
    "In {year} the wardens had a wall built, and in the next year a gate in it.",
    "The oldest house belongs to {owner}, who keeps {O} in it.",
    "Nobody there has forgotten that {M} {when}.",
    "{weather} on the day the founder died, and it is said to do so each year.",
    "A {A.trade} can make a living in {T}, if he does not mind talk about {subject}.",
    "The bell is rung for fire, for flood, and for {subject}."};

constexpr std::string_view kPortraits[] = {
    "{A.full} was born in {A.town} in the year {A.born}, the child of a {trade}.",
    "{A.He} had {look}, and {habit}.",
    "At {number} years of age {A.he} could already tell good {goods} from bad.",
    "{A.His} neighbours knew {A.him} as a {A.trade}, and as one who {habit}.",
    "The only thing of value {A.he} owned was {mine}.",
    "{A.kin} used to say that nobody could cheat {A.him} twice.",
    "{A.He} learned the trade from a {trade} in {T} who paid {A.him} in {food}.",
    "Of {subject} {A.he} would speak for hours, of {A.him}self never.",
    "It was {A.he} who later stood beside {B} when it counted.",
    "{A.He} arrived in {T} with {mine} and {sum}.",
    "Some thought {A.him} cold, but {B} knew better."};

constexpr std::string_view kChapterTitles[] = {
    "The Road to {T}",        "What {A} Knew",     "{Thing}",          "A Debt in {T}",
    "The {Season} of {year}", "{A} and {B}",       "Under {T.mark}",   "Of {subject}",
    "The Return of {A}",      "A Letter from {C}", "{B} Says Nothing", "Across {T.river}"};

struct NamedList {
  std::string_view name;
  Words words;
};
constexpr NamedList kLists[] = {
    {"weather", kWeather}, {"feeling", kFeelings}, {"goods", kGoods},      {"food", kFood},
    {"sound", kSounds},    {"room", kRooms},       {"subject", kSubjects}, {"sum", kSums},
    {"task", kTasks},      {"habit", kHabits},     {"look", kLooks},       {"oath", kOaths},
    {"time", kTimes},      {"manner", kManner},    {"number", kNumbers},   {"trade", kTrades},
    {"adj", kAdjectives},  {"noun", kNouns},       {"did", kVerbs}};

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') {
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  }
  return text;
}

// Draws from lists so that every entry of a list comes once before any comes again.
class Deck {
 public:
  explicit Deck(TextRandom& random) : random_(random) {}

  std::string_view draw(Words words) { return words[index(words.data(), words.size())]; }
  std::size_t index(const void* list, std::size_t count) {
    std::vector<std::size_t>& left = left_[list];
    if (left.empty()) {
      for (std::size_t i = 0; i < count; ++i) left.push_back(i);
    }
    std::swap(left[random_.below(left.size())], left.back());
    const std::size_t drawn = left.back();
    left.pop_back();
    return drawn;
  }

 private:
  TextRandom& random_;
  std::map<const void*, std::vector<std::size_t>> left_;
};

class Prose {
 public:
  explicit Prose(std::uint64_t seed) : random_(seed, 1), deck_(random_) {
    year_ = random_.between(1690, 1830);
    season_ = random_.below(4);
    while (people_.size() < 8) add_person();
    live_before();
  }

  // With the empty line after it.
  std::string paragraph() {
    std::string text;
    if (paragraphs_left_ == 0) text = start_chapter();
    --paragraphs_left_;
    cast();
    if (!fresh_.empty() && random_.percent(45)) {
      a_ = fresh_.back();
      fresh_.pop_back();
      recast_others();
      text += portrait();
    } else {
      const int kind = random_.between(0, 99);
      if (kind < 46) {
        text += narrative();
      } else if (kind < 72) {
        text += dialogue();
      } else if (kind < 82) {
        text += letter();
      } else if (kind < 90) {
        text += sentences(kTownSentences, random_.between(3, 6));
      } else {
        text += annals();
      }
    }
    if (text.back() == ' ') text.pop_back();
    return text + "\n\n";
  }

 private:
  struct Kin {
    std::string_view relation;
    std::size_t other;
  };
  struct Person {
    std::string given;
    std::string family;
    bool female = false;
    std::string_view trade;
    std::string_view look;
    std::string_view habit;
    std::size_t town = 0;
    int born = 0;
    bool married = false;
    std::vector<Kin> kin;
  };
  struct Thing {
    std::string text;
    std::size_t owner;
  };
  struct Event {
    std::string text;
    std::size_t actor;
    std::size_t other;
    int year;
    std::size_t season;
  };

  void add_person() {
    Person person;
    person.female = random_.percent(50);
    person.given = deck_.draw(person.female ? Words(kWomen) : Words(kMen));
    person.family = deck_.draw(kFamilies);
    person.trade = deck_.draw(kTrades);
    person.look = deck_.draw(kLooks);
    person.habit = deck_.draw(kHabits);
    person.town = random_.below(std::size(kTowns));
    person.born = year_ - random_.between(19, 61);
    const std::size_t self = people_.size();
    if (self > 0 && random_.percent(60)) {
      const std::size_t other = random_.below(self);
      Person& relative = people_[other];
      if (random_.percent(45)) {
        person.family = relative.family;
        person.born = relative.born + random_.between(2, 7);
        person.kin.push_back({relative.female ? "sister" : "brother", other});
        relative.kin.push_back({person.female ? "sister" : "brother", self});
      } else if (year_ - relative.born > 40) {
        person.born = relative.born + random_.between(20, 24);
        person.kin.push_back({relative.female ? "aunt" : "uncle", other});
        relative.kin.push_back({person.female ? "niece" : "nephew", self});
      } else {
        person.kin.push_back({"cousin", other});
        relative.kin.push_back({"cousin", self});
      }
    }
    people_.push_back(person);
    std::string thing = "the " + std::string(random_.pick(Words(kMaterials)));
    thing += " " + std::string(deck_.draw(kThings));
    things_.push_back({thing, self});
    fresh_.push_back(self);
  }

  // Gives the first chapter something to look back to.
  void live_before() {
    for (int i = 0; i < 16; ++i) {
      pass_time();
      choose_regulars();
      cast();
      deed();
    }
  }

  void pass_time() {
    const std::size_t seasons = season_ + 1 + random_.below(4);
    year_ += static_cast<int>(seasons / 4);
    season_ = seasons % 4;
  }

  std::string start_chapter() {
    ++chapter_;
    if (chapter_ > 1) {
      pass_time();
      for (int i = random_.between(0, 2); i > 0; --i) add_person();
    }
    paragraphs_left_ = random_.between(6, 15);
    choose_regulars();
    cast();
    return "Chapter " + std::to_string(chapter_) + ": " + capitalized(one_of(kChapterTitles)) +
           "\n\n";
  }

  void choose_regulars() {
    regulars_.clear();
    while (regulars_.size() < 4) {
      const std::size_t person = random_.below(people_.size());
      if (std::find(regulars_.begin(), regulars_.end(), person) == regulars_.end()) {
        regulars_.push_back(person);
      }
    }
    town_ = people_[regulars_[0]].town;
  }

  void cast() {
    a_ = regulars_[random_.below(regulars_.size())];
    recast_others();
    town_ = random_.percent(75) ? town_ : random_.below(std::size(kTowns));
    // A thing that one of them owns, most of the time.
    thing_ = random_.below(things_.size());
    for (std::size_t i = 0; i < things_.size() && random_.percent(96); ++i) {
      if (things_[i].owner == a_ || things_[i].owner == b_) thing_ = i;
    }
  }
  void recast_others() {
    do {
      b_ = regulars_[random_.below(regulars_.size())];
    } while (b_ == a_);
    do {
      c_ = random_.below(people_.size());
    } while (c_ == a_ || c_ == b_);
  }

  std::string sentence(Words templates) { return capitalized(one_of(templates)) + " "; }
  // One sentence speaks of one event.
  std::string one_of(Words templates) {
    if (!events_.empty()) recalled_ = recall();
    subject_.clear();
    std::string text = expand(deck_.draw(templates));
    for (std::size_t i = 2; i < text.size(); ++i) {
      const bool article = text[i - 1] == ' ' && (text[i - 2] == 'a' || text[i - 2] == 'A') &&
                           (i == 2 || text[i - 3] == ' ' || text[i - 3] == '"');
      if (article && std::string_view("aeiou").find(text[i]) < 5) text.insert(i - 1, "n");
    }
    return text;
  }
  std::string sentences(Words templates, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += sentence(templates);
    return text;
  }

  std::string memory() {
    if (events_.empty()) return sentence(kThingMemories);
    return random_.percent(70) ? sentence(kMemories) : sentence(kThingMemories);
  }

  std::string narrative() {
    std::string text = sentence(kOpenings);
    const int length = random_.between(2, 7);
    const int deed_at = random_.between(0, length);
    for (int i = 0; i <= length; ++i) {
      if (i == deed_at) {
        text += deed();
      } else if (random_.percent(22)) {
        text += memory();
      } else {
        text += random_.percent(40) ? sentence(kJoins) : sentence(kFillers);
      }
    }
    if (random_.percent(60)) text += sentence(kClosings);
    return text;
  }

  // Only what is possible now, so that later sentences can rely on it.
  bool possible(Effect effect) const {
    const auto indebted = [&](std::size_t debtor, std::size_t creditor) {
      return std::find(debts_.begin(), debts_.end(), std::pair(debtor, creditor)) != debts_.end();
    };
    switch (effect) {
      case Effect::give_thing:
        return things_[thing_].owner == a_;
      case Effect::take_thing:
        return things_[thing_].owner != a_;
      case Effect::move:
        return people_[a_].town != town_;
      case Effect::marry:
        return !people_[a_].married && !people_[b_].married &&
               people_[a_].female != people_[b_].female &&
               people_[a_].family != people_[b_].family &&
               std::none_of(people_[a_].kin.begin(), people_[a_].kin.end(),
                            [&](const Kin& kin) { return kin.other == b_; });
      case Effect::debt:
        return !indebted(a_, b_);
      case Effect::repay:
        return indebted(a_, b_);
      case Effect::quarrel:
      case Effect::none:
        break;
    }
    return true;
  }

  std::string deed() {
    const Deed* deed = nullptr;
    do {
      deed = &kDeeds[deck_.index(kDeeds, std::size(kDeeds))];
    } while (!possible(deed->effect));
    // What is remembered must name the same task or subject.
    fixed_.clear();
    fixing_ = true;
    deed_ = expand(deed->past);
    const std::string memory = people_[a_].given + " had " + expand(deed->participle);
    fixing_ = false;
    const std::string text = sentence(kDeedFrames);
    events_.push_back({memory, a_, b_, year_, season_});
    switch (deed->effect) {
      case Effect::give_thing:
        things_[thing_].owner = b_;
        break;
      case Effect::take_thing:
        things_[thing_].owner = a_;
        break;
      case Effect::move:
        people_[a_].town = town_;
        break;
      case Effect::marry:
        people_[a_].married = people_[b_].married = true;
        people_[a_].kin.push_back({people_[b_].female ? "wife" : "husband", b_});
        people_[b_].kin.push_back({people_[a_].female ? "wife" : "husband", a_});
        break;
      case Effect::debt:
        debts_.emplace_back(a_, b_);
        break;
      case Effect::repay:
        debts_.erase(std::find(debts_.begin(), debts_.end(), std::pair(a_, b_)));
        break;
      case Effect::quarrel:
      case Effect::none:
        break;
    }
    return text;
  }

  std::string quote(Words words, std::size_t speaker, std::string_view end) {
    std::string text = "\"" + capitalized(one_of(words));
    const int form = random_.between(0, 9);
    if (form < 5) {
      text += std::string(end == "." ? "," : end) + "\" ";
      text += end == "?" ? "asked" : std::string(random_.pick(Words(kSpeaking)));
      text += " " + people_[speaker].given;
      if (form < 2) text += " " + expand("{manner}");
      return text + ". ";
    }
    return text + std::string(end) + "\" ";
  }

  std::string dialogue() {
    std::string text;
    if (random_.percent(50)) text += sentence(kOpenings);
    const int turns = random_.between(2, 5);
    for (int i = 0; i < turns; ++i) {
      const bool asks = random_.percent(65);
      text += quote(asks ? Words(kQuestions) : Words(kStatements), i % 2 == 0 ? a_ : b_,
                    asks ? "?" : ".");
      text += "\n\n";
      text += quote(kAnswers, i % 2 == 0 ? b_ : a_, ".");
      if (random_.percent(30)) text += sentence(kBeats);
      if (i + 1 < turns) text += "\n\n";
    }
    if (random_.percent(40)) text += sentence(kClosings);
    for (std::size_t at = text.find(" \n"); at != std::string::npos; at = text.find(" \n")) {
      text.erase(at, 1);
    }
    return text;
  }

  std::string letter() {
    std::string text = std::string(kTowns[people_[a_].town]) + ", in the " +
                       std::string(kSeasons[season_]) + " of " + std::to_string(year_) + ".\n\n";
    text += "Dear " + people_[b_].given + ",\n\n";
    text += sentence(kLetterOpenings);
    text += sentences(kLetterBodies, random_.between(2, 5));
    text.pop_back();
    return text + "\n\nYour " + signature() + ",\n" + people_[a_].given + " " + people_[a_].family;
  }
  std::string signature() const {
    for (const Kin& kin : people_[b_].kin) {
      if (kin.other == a_) return std::string(kin.relation);
    }
    return "friend";
  }

  std::string annals() {
    std::string text =
        "The register of " + std::string(kTowns[town_]) + " for " + std::to_string(year_) + " ";
    if (events_.size() < 4) return text + "is lost. " + sentences(kTownSentences, 2);
    text += "is short. ";
    // In the order in which things happened.
    std::size_t at = random_.below(events_.size() - 3);
    for (int i = random_.between(2, 4); i > 0 && at < events_.size(); --i) {
      text += "It says that " + events_[at].text + " " + when(events_[at]) + ". ";
      if (random_.percent(50)) text += sentence(kJoins);
      at += 1 + random_.below(3);
    }
    return text;
  }

  std::string portrait() {
    std::string text = sentence(Words(kPortraits).first(1));
    std::vector<std::size_t> rest;
    for (std::size_t i = 1; i < std::size(kPortraits); ++i) rest.push_back(i);
    random_.shuffle(rest);
    rest.resize(static_cast<std::size_t>(random_.between(2, 5)));
    for (const std::size_t i : rest) text += sentence(Words(kPortraits).subspan(i, 1));
    return text;
  }

  std::string when(const Event& event) const {
    const std::string season(kSeasons[event.season]);
    if (event.year == year_)
      return event.season == season_ ? "that very " + season : "in the " + season;
    if (event.year == year_ - 1) return "in the " + season + " of the year before";
    return "in the " + season + " of " + std::to_string(event.year);
  }

  // One that concerns those who are present, if there is one, and not always the newest.
  const Event& recall() {
    std::vector<std::size_t> known;
    for (std::size_t i = 0; i < events_.size(); ++i) {
      const Event& event = events_[i];
      if (event.actor == a_ || event.actor == b_ || event.other == a_) known.push_back(i);
    }
    if (known.empty() || random_.percent(25)) return events_[random_.below(events_.size())];
    return events_[known[random_.below(known.size())]];
  }

  std::string kin_of(std::size_t self) {
    Person& person = people_[self];
    if (person.kin.empty()) {
      std::size_t other = 0;
      do {
        other = random_.below(people_.size());
      } while (other == self);
      person.kin.push_back({random_.percent(50) ? "neighbour" : "partner", other});
    }
    const Kin& kin = person.kin[random_.below(person.kin.size())];
    return std::string(person.female ? "her " : "his ") + std::string(kin.relation) + " " +
           people_[kin.other].given;
  }

  std::string of_person(std::size_t self, std::string_view form) {
    const Person& person = people_[self];
    if (form.empty()) return person.given;
    if (form == "full") return person.given + " " + person.family;
    if (form == "trade") return std::string(person.trade);
    if (form == "town") return std::string(kTowns[person.town]);
    if (form == "born") return std::to_string(person.born);
    if (form == "look") return std::string(person.look);
    if (form == "habit") return expand(person.habit);
    if (form == "kin") return kin_of(self);
    if (form == "he") return person.female ? "she" : "he";
    if (form == "He") return person.female ? "She" : "He";
    if (form == "him") return person.female ? "her" : "him";
    if (form == "his") return person.female ? "her" : "his";
    return person.female ? "Her" : "His";
  }

  std::string value(std::string_view key) {
    const std::string_view form = key.size() > 2 && key[1] == '.' ? key.substr(2) : "";
    if (key[0] == 'A') return of_person(a_, form);
    if (key[0] == 'B') return of_person(b_, form);
    if (key[0] == 'C') return of_person(c_, form);
    if (key == "T") return std::string(kTowns[town_]);
    if (key == "T.river") return std::string(kRivers[town_ % std::size(kRivers)]);
    if (key == "T.mark") {
      return std::string(kLandmarks[(town_ * 7 + random_.below(3)) % std::size(kLandmarks)]);
    }
    if (key == "O") return things_[thing_].text;
    if (key == "Thing") return capitalized(things_[thing_].text);
    if (key == "owner") return people_[things_[thing_].owner].given;
    if (key == "mine") {
      for (const Thing& thing : things_) {
        if (thing.owner == a_) return "a certain" + thing.text.substr(3);
      }
      return "a good name";
    }
    if (key == "M") {
      return events_.empty() ? "the bridge had fallen" : recalled_.text;
    }
    if (key == "when") return recalled_.text.empty() ? "long ago" : when(recalled_);
    if (key == "deed") return deed_;
    if (key == "season") return std::string(kSeasons[season_]);
    if (key == "Season") return capitalized(std::string(kSeasons[season_]));
    if (key == "year") return std::to_string(year_);
    if (key == "clause") {
      // The subject of both clauses is named once.
      std::string clause(deck_.draw(kClauses));
      const std::string subject = clause.substr(0, 4);
      if (subject == subject_ && (subject == "{A} " || subject == "{B} ")) clause.insert(2, ".he");
      subject_ = subject;
      return expand(clause);
    }
    for (const NamedList& list : kLists) {
      if (list.name == key) return expand(deck_.draw(list.words));
    }
    return std::string(key);
  }

  std::string expand(std::string_view pattern) {
    std::string text;
    while (true) {
      const std::size_t open = pattern.find('{');
      text += pattern.substr(0, open);
      if (open == std::string_view::npos) return text;
      const std::size_t close = pattern.find('}', open);
      const std::string key(pattern.substr(open + 1, close - open - 1));
      pattern.remove_prefix(close + 1);
      if (!fixing_) {
        text += value(key);
        continue;
      }
      const auto known = fixed_.find(key);
      text += known != fixed_.end() ? known->second : fixed_[key] = value(key);
    }
  }

  TextRandom random_;
  Deck deck_;
  std::vector<Person> people_;
  std::vector<Thing> things_;
  std::vector<Event> events_;
  std::vector<std::pair<std::size_t, std::size_t>> debts_;
  std::vector<std::size_t> fresh_;
  std::vector<std::size_t> regulars_;
  std::map<std::string, std::string> fixed_;
  bool fixing_ = false;
  std::string deed_;
  std::string subject_;
  Event recalled_{};
  std::size_t a_ = 0;
  std::size_t b_ = 0;
  std::size_t c_ = 0;
  std::size_t town_ = 0;
  std::size_t thing_ = 0;
  std::size_t season_ = 0;
  int year_ = 0;
  int chapter_ = 0;
  int paragraphs_left_ = 0;
};

// ---- Code: the words and the patterns. $Class, $item, $items, $num, $text, $flag name a record
// and three of its fields, $f(total) the function that the pattern "total" defined for them before.

struct Record {
  std::string_view type;
  std::string_view item;
  std::string_view items;
};
constexpr Record kRecords[] = {{"Invoice", "invoice", "invoices"},
                               {"Shipment", "shipment", "shipments"},
                               {"Sensor", "sensor", "sensors"},
                               {"Ticket", "ticket", "tickets"},
                               {"Account", "account", "accounts"},
                               {"Parcel", "parcel", "parcels"},
                               {"Session", "session", "sessions"},
                               {"Packet", "packet", "packets"},
                               {"Reading", "reading", "readings"},
                               {"Warehouse", "warehouse", "warehouses"},
                               {"Booking", "booking", "bookings"},
                               {"Payment", "payment", "payments"},
                               {"Route", "route", "routes"},
                               {"Vessel", "vessel", "vessels"},
                               {"Patient", "patient", "patients"},
                               {"Recipe", "recipe", "recipes"},
                               {"Contract", "contract", "contracts"},
                               {"Machine", "machine", "machines"},
                               {"Job", "job", "jobs"},
                               {"Worker", "worker", "workers"},
                               {"Message", "message", "messages"},
                               {"Lesson", "lesson", "lessons"},
                               {"Crawler", "crawler", "crawlers"},
                               {"Planet", "planet", "planets"}};
constexpr std::string_view kNumberFields[] = {
    "amount",   "weight",   "priority", "balance", "size",   "duration", "distance", "score",
    "capacity", "quantity", "latency",  "price",   "volume", "attempts", "mass",     "level"};
constexpr std::string_view kTextFields[] = {"owner", "label",  "region",   "status",
                                            "city",  "kind",   "customer", "channel",
                                            "group", "origin", "code",     "host"};
constexpr std::string_view kFlagFields[] = {"active",   "paid",    "late",    "archived",
                                            "verified", "fragile", "blocked", "urgent"};
constexpr std::string_view kTextValues[] = {"north",  "alpha", "delta", "harbor", "blue", "central",
                                            "retail", "omega", "east",  "spare",  "lima", "upper"};
constexpr std::string_view kPackages[] = {"core",    "billing",  "storage", "network",
                                          "reports", "planning", "archive", "monitor"};

struct Pattern {
  std::string_view id;
  std::string_view name;
  std::string_view needs;
  std::string_view body;
};

constexpr Pattern kPython[] = {
    {"total", "total_$num", "", R"(def $name($items: list[$Class]) -> float:
    """Return the sum of $num over all $items."""
    return sum($item.$num for $item in $items)
)"},
    {"largest", "largest_$item_by_$num", "", R"(def $name($items: list[$Class]) -> $Class | None:
    """Return the $item with the highest $num, or None if there is none."""
    best = None
    for $item in $items:
        if best is None or $item.$num > best.$num:
            best = $item
    return best
)"},
    {"mean", "mean_$num", "total", R"(def $name($items: list[$Class]) -> float:
    """Return the average $num; an empty list has none."""
    if not $items:
        raise ValueError("no $items to average")
    return $f(total)($items) / len($items)
)"},
    {"group", "group_$items_by_$text", "",
     R"(def $name($items: list[$Class]) -> dict[str, list[$Class]]:
    """Collect the $items that share a $text, in their original order."""
    groups: dict[str, list[$Class]] = {}
    for $item in $items:
        groups.setdefault($item.$text, []).append($item)
    return groups
)"},
    {"totals", "$num_per_$text", "group total",
     R"(def $name($items: list[$Class]) -> dict[str, float]:
    """Add up the $num of each $text."""
    return {$text: $f(total)(group) for $text, group in $f(group)($items).items()}
)"},
    {"only", "only_$flag", "", R"(def $name($items: list[$Class]) -> list[$Class]:
    """Drop every $item that is not $flag."""
    return [$item for $item in $items if $item.$flag]
)"},
    {"find", "find_$item", "", R"(def $name($items: list[$Class], $text: str) -> $Class:
    """Return the first $item whose $text matches, ignoring case."""
    wanted = $text.lower()
    for $item in $items:
        if $item.$text.lower() == wanted:
            return $item
    raise KeyError(f"no $item with $text {$text!r}")
)"},
    {"parse", "parse_$item", "", R"(def $name(line: str) -> $Class:
    """Read one $item from a line of the form '$text;$num;$flag'."""
    parts = line.strip().split(";")
    if len(parts) != 3:
        raise ValueError(f"expected 3 fields, found {len(parts)}: {line!r}")
    $text, $num, $flag = parts
    return $Class($text=$text, $num=float($num), $flag=$flag == "yes")
)"},
    {"format", "format_$item", "", R"(def $name($item: $Class) -> str:
    """Write the $item as one line."""
    $flag = "yes" if $item.$flag else "no"
    return f"{$item.$text};{$item.$num};{$flag}"
)"},
    {"load", "load_$items", "parse", R"(def $name(path: Path) -> list[$Class]:
    """Read all $items of a file; empty lines and lines that start with # are skipped."""
    $items = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            $items.append($f(parse)(line))
    return $items
)"},
    {"save", "save_$items", "format", R"(def $name(path: Path, $items: list[$Class]) -> int:
    """Write the $items to a file and return how many there were."""
    lines = [$f(format)($item) for $item in $items]
    path.write_text("\n".join(lines) + "\n")
    return len(lines)
)"},
    {"running", "running_$num", "", R"(def $name($items: list[$Class]) -> list[float]:
    """Return the partial sums of $num, one for each $item."""
    sums: list[float] = []
    so_far = 0.0
    for $item in $items:
        so_far += $item.$num
        sums.append(so_far)
    return sums
)"},
    {"above", "$items_above", "",
     R"(def $name($items: list[$Class], limit: float = $limit) -> list[$Class]:
    """Return the $items whose $num exceeds the limit, highest first."""
    chosen = [$item for $item in $items if $item.$num > limit]
    return sorted(chosen, key=lambda $item: -$item.$num)
)"},
    {"scale", "scale_$num", "", R"(def $name($items: list[$Class], factor: float) -> None:
    """Multiply every $num by the factor, in place."""
    if factor <= 0:
        raise ValueError(f"factor must be positive, not {factor}")
    for $item in $items:
        $item.$num *= factor
)"},
    {"share", "share_of_$flag", "only", R"(def $name($items: list[$Class]) -> float:
    """Return which part of the $items is $flag, between 0 and 1."""
    if len($items) == 0:
        return 0.0
    return len($f(only)($items)) / len($items)
)"},
    {"check", "check_$item", "", R"(def $name($item: $Class) -> list[str]:
    """Return a message for everything that is wrong with the $item."""
    problems = []
    if $item.$num < 0:
        problems.append(f"$num is negative: {$item.$num}")
    if $item.$num > $limit:
        problems.append(f"$num is above $limit: {$item.$num}")
    if not $item.$text:
        problems.append("$text is empty")
    return problems
)"},
    {"import", "import_$items", "load check", R"(def $name(path: Path) -> list[$Class]:
    """Load the $items of a file and refuse it if one of them is faulty."""
    $items = $f(load)(path)
    for number, $item in enumerate($items, start=1):
        problems = $f(check)($item)
        if problems:
            raise ValueError(f"{path}: $item {number}: " + ", ".join(problems))
    return $items
)"},
    {"report", "report_on_$items", "mean share", R"(def $name($items: list[$Class]) -> str:
    """Summarize the $items for people."""
    lines = [f"{len($items)} $items"]
    lines.append(f"average $num: {$f(mean)($items):.2f}")
    lines.append(f"$flag: {100 * $f(share)($items):.0f} %")
    return "\n".join(lines)
)"},
    {"store", "$ClassStore", "find", R"(class $name:
    """Keeps $items in memory and counts every access."""

    def __init__(self, limit: int = $limit) -> None:
        self._limit = limit
        self._$items: list[$Class] = []
        self.accesses = 0

    def add(self, $item: $Class) -> None:
        if len(self._$items) >= self._limit:
            raise OverflowError(f"the store holds at most {self._limit} $items")
        self._$items.append($item)

    def get(self, $text: str) -> $Class:
        self.accesses += 1
        return $f(find)(self._$items, $text)

    def __len__(self) -> int:
        return len(self._$items)
)"},
    {"test_total", "test_$f(total)", "total", R"(def $name() -> None:
    $items = [
        $Class($text="$v1", $num=$n1, $flag=True),
        $Class($text="$v2", $num=$n2, $flag=False),
        $Class($text="$v1", $num=$n3, $flag=True),
    ]
    assert $f(total)($items) == $sum
    assert $f(total)([]) == 0
)"},
    {"test_roundtrip", "test_$f(format)_roundtrip", "format parse", R"(def $name() -> None:
    $item = $Class($text="$v1", $num=$n1, $flag=True)
    assert $f(format)($item) == "$v1;$n1;yes"
    assert $f(parse)($f(format)($item)) == $item
)"},
    {"test_find", "test_$f(find)_ignores_case", "find", R"(def $name() -> None:
    $items = [$Class($text="$v1", $num=$n1, $flag=False)]
    assert $f(find)($items, "$v1".upper()).$num == $n1
    with pytest.raises(KeyError):
        $f(find)($items, "$v2")
)"},
    {"test_only", "test_$f(only)", "only share", R"(def $name() -> None:
    first = $Class($text="$v1", $num=$n1, $flag=True)
    second = $Class($text="$v2", $num=$n2, $flag=False)
    assert $f(only)([first, second]) == [first]
    assert $f(share)([first, second]) == 0.5
)"}};

constexpr Pattern kCpp[] = {
    {"total", "total_$num", "", R"(// The sum of $num over all $items; 0 if there are none.
double $name(const std::vector<$Class>& $items) {
  double sum = 0;
  for (const $Class& $item : $items) sum += $item.$num;
  return sum;
}
)"},
    {"mean", "mean_$num", "total", R"(double $name(const std::vector<$Class>& $items) {
  if ($items.empty()) throw std::invalid_argument("no $items to average");
  return $f(total)($items) / static_cast<double>($items.size());
}
)"},
    {"find", "find_$item", "", R"(// The first $item with this $text, or null.
const $Class* $name(const std::vector<$Class>& $items, std::string_view $text) {
  const auto found = std::find_if($items.begin(), $items.end(),
                                  [&](const $Class& $item) { return $item.$text == $text; });
  return found == $items.end() ? nullptr : &*found;
}
)"},
    {"only", "only_$flag", "", R"(std::vector<$Class> $name(const std::vector<$Class>& $items) {
  std::vector<$Class> chosen;
  for (const $Class& $item : $items) {
    if ($item.$flag) chosen.push_back($item);
  }
  return chosen;
}
)"},
    {"group", "$items_by_$text", "", R"(// Keeps the order within each $text.
std::map<std::string, std::vector<$Class>> $name(const std::vector<$Class>& $items) {
  std::map<std::string, std::vector<$Class>> groups;
  for (const $Class& $item : $items) groups[$item.$text].push_back($item);
  return groups;
}
)"},
    {"totals", "$num_per_$text", "group total",
     R"(std::map<std::string, double> $name(const std::vector<$Class>& $items) {
  std::map<std::string, double> sums;
  for (const auto& [$text, group] : $f(group)($items)) sums[$text] = $f(total)(group);
  return sums;
}
)"},
    {"format", "to_string", "", R"(std::string $name(const $Class& $item) {
  std::ostringstream line;
  line << $item.$text << ';' << $item.$num << ';' << ($item.$flag ? "yes" : "no");
  return line.str();
}
)"},
    {"sort", "sort_by_$num", "", R"(// Highest $num first; equal ones keep their order.
void $name(std::vector<$Class>& $items) {
  std::stable_sort($items.begin(), $items.end(), [](const $Class& left, const $Class& right) {
    return left.$num > right.$num;
  });
}
)"},
    {"top", "top_$items", "sort",
     R"(std::vector<$Class> $name(std::vector<$Class> $items, std::size_t count = $limit) {
  $f(sort)($items);
  if ($items.size() > count) $items.resize(count);
  return $items;
}
)"},
    {"store", "$ClassStore", "find", R"(class $name {
 public:
  explicit $name(std::size_t limit = $limit) : limit_(limit) {}

  void add($Class $item) {
    if ($items_.size() >= limit_) throw std::length_error("too many $items");
    $items_.push_back(std::move($item));
  }
  const $Class* get(std::string_view $text) {
    ++accesses_;
    return $f(find)($items_, $text);
  }
  std::size_t size() const { return $items_.size(); }

 private:
  std::size_t limit_;
  std::size_t accesses_ = 0;
  std::vector<$Class> $items_;
};
)"},
    {"test_total", "$f(total)_adds_up", "total", R"(TEST($ClassTest, $name) {
  const std::vector<$Class> $items = {{"$v1", $n1, true}, {"$v2", $n2, false}, {"$v3", $n3, true}};
  EXPECT_EQ($f(total)($items), $sum);
  EXPECT_EQ($f(total)({}), 0);
}
)"},
    {"test_find", "$f(find)_knows_what_is_missing", "find", R"(TEST($ClassTest, $name) {
  const std::vector<$Class> $items = {{"$v1", $n1, true}, {"$v2", $n2, false}};
  ASSERT_NE($f(find)($items, "$v2"), nullptr);
  EXPECT_EQ($f(find)($items, "$v2")->$num, $n2);
  EXPECT_EQ($f(find)($items, "$v3"), nullptr);
}
)"},
    {"test_format", "$f(format)_writes_all_fields", "format", R"(TEST($ClassTest, $name) {
  EXPECT_EQ($f(format)($Class{"$v1", $n1, true}), "$v1;$n1;yes");
  EXPECT_EQ($f(format)($Class{"$v3", $n3, false}), "$v3;$n3;no");
}
)"}};

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

class Code {
 public:
  explicit Code(std::uint64_t seed) : random_(seed, 2), deck_(random_) {}

  std::string definition() {
    if (pending_.empty()) return start_module();
    const std::size_t count = pending_.size();
    // The first one whose parts are there: what needs nothing always is.
    for (std::size_t i = 0; i < count; ++i) {
      const Pattern& pattern = *pending_[i];
      if (!ready(pattern)) continue;
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
      const std::string name = fill(pattern.name);
      defined_[std::string(pattern.id)] = name;
      return replaced(fill(pattern.body), "$name", name) + gap();
    }
    pending_.clear();
    return start_module();
  }

 private:
  std::string gap() const { return python_ ? "\n\n" : "\n"; }

  bool ready(const Pattern& pattern) const {
    std::string_view needs = pattern.needs;
    while (!needs.empty()) {
      const std::size_t space = needs.find(' ');
      if (defined_.find(std::string(needs.substr(0, space))) == defined_.end()) return false;
      needs = space == std::string_view::npos ? "" : needs.substr(space + 1);
    }
    return true;
  }

  std::string start_module() {
    const std::string before =
        record_ == nullptr ? "" : std::string(record_->items) + (python_ ? "" : ".hpp");
    const bool was_python = python_;
    const bool continues = record_ != nullptr && random_.percent(50);
    python_ = random_.percent(65);
    record_ = &kRecords[deck_.index(kRecords, std::size(kRecords))];
    number_ = random_.pick(Words(kNumberFields));
    text_ = random_.pick(Words(kTextFields));
    flag_ = random_.pick(Words(kFlagFields));
    defined_.clear();
    pending_.clear();
    const std::span<const Pattern> patterns =
        python_ ? std::span<const Pattern>(kPython) : std::span<const Pattern>(kCpp);
    for (const Pattern& pattern : patterns) {
      if (random_.percent(75)) pending_.push_back(&pattern);
    }
    random_.shuffle(pending_);
    // Tests follow what they test.
    std::stable_partition(pending_.begin(), pending_.end(), [](const Pattern* pattern) {
      return pattern->id.substr(0, 5) != "test_";
    });
    const std::string folder(random_.pick(Words(kPackages)));
    std::string text;
    if (python_) {
      text = "# " + folder + R"(/$items.py
"""Everything that $folder knows about $items."""

from dataclasses import dataclass
from pathlib import Path

import pytest
)";
      if (continues && was_python) text += "\nfrom " + folder + " import " + before + "\n";
      text += R"(

@dataclass
class $Class:
    $text: str
    $num: float
    $flag: bool = False
)";
    } else {
      text = "// " + folder + "/$items.hpp: everything that $folder knows about $items.\n" + R"(
#include <algorithm>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>
)";
      if (continues && !was_python) text += "\n#include \"" + before + "\"\n";
      text += R"(
struct $Class {
  std::string $text;
  double $num = 0;
  bool $flag = false;
};
)";
    }
    return fill(replaced(text, "$folder", folder)) + gap();
  }

  std::string fill(std::string_view pattern) {
    std::string text(pattern);
    for (const auto& [id, name] : defined_) text = replaced(text, "$f(" + id + ")", name);
    text = replaced(text, "$Class", record_->type);
    text = replaced(text, "$items", record_->items);
    text = replaced(text, "$item", record_->item);
    text = replaced(text, "$num", number_);
    text = replaced(text, "$text", text_);
    text = replaced(text, "$flag", flag_);
    text = replaced(text, "$limit", std::to_string(random_.between(2, 40) * 25));
    const std::array<int, 3> numbers = {random_.between(1, 90), random_.between(1, 90),
                                        random_.between(1, 90)};
    text = replaced(text, "$sum", std::to_string(numbers[0] + numbers[1] + numbers[2]));
    std::size_t value = random_.below(std::size(kTextValues));
    for (std::size_t i = 0; i < 3; ++i) {
      const std::string place = std::to_string(i + 1);
      text = replaced(text, "$n" + place, std::to_string(numbers[i]));
      text = replaced(text, "$v" + place, kTextValues[value]);
      value = (value + 1 + random_.below(3)) % std::size(kTextValues);
    }
    return text;
  }

  TextRandom random_;
  Deck deck_;
  bool python_ = true;
  const Record* record_ = nullptr;
  std::string_view number_;
  std::string_view text_;
  std::string_view flag_;
  std::map<std::string, std::string> defined_;
  std::vector<const Pattern*> pending_;
};

// ---- UUIDs.

constexpr std::string_view kKeyNames[] = {
    "harbor", "engine", "mirror", "ledger", "beacon", "valley", "copper", "signal",
    "garden", "rocket", "saddle", "window", "anchor", "bridge", "candle", "forest"};

class Uuids {
 public:
  explicit Uuids(std::uint64_t seed) : random_(seed, 3) {}

  // Entries are numbered from 1.
  std::string line() {
    if (entries_.size() >= 4 && random_.percent(25)) {
      // Half of the copies are of recent entries, the others of any.
      const std::size_t reach =
          random_.percent(50) ? std::min<std::size_t>(20, entries_.size()) : entries_.size();
      const std::size_t entry = entries_.size() - 1 - random_.below(reach);
      return "copy of entry " + std::to_string(entry + 1) + ": " + entries_[entry] + "\n";
    }
    std::string entry(random_.pick(Words(kKeyNames)));
    entry += "-" + std::to_string(random_.between(100, 999));
    entry += " -> " + random_.uuid();
    entries_.push_back(entry);
    return "entry " + std::to_string(entries_.size()) + ": " + entry + "\n";
  }

 private:
  TextRandom random_;
  std::vector<std::string> entries_;
};

constexpr std::string_view kKindNames[] = {"prose", "code", "uuids"};

}  // namespace

std::string_view name(TextKind kind) { return kKindNames[static_cast<std::size_t>(kind)]; }

std::optional<TextKind> parse_text_kind(std::string_view text) {
  for (const TextKind kind : {TextKind::prose, TextKind::code, TextKind::uuids}) {
    if (name(kind) == text) return kind;
  }
  return std::nullopt;
}

std::string generate_text(TextKind kind, std::uint64_t seed, std::size_t bytes) {
  std::string text;
  text.reserve(bytes + 1024);
  if (kind == TextKind::prose) {
    Prose prose(seed);
    while (text.size() < bytes) text += prose.paragraph();
  } else if (kind == TextKind::code) {
    Code code(seed);
    while (text.size() < bytes) text += code.definition();
  } else {
    Uuids uuids(seed);
    while (text.size() < bytes) text += uuids.line();
  }
  return text;
}

}  // namespace verkv::llm
