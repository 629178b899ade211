// What ref computes, as a list of hashes in the tree: tests/golden/results.txt. A change of
// structure must leave every line as it is; a change of results rewrites the list and says why in
// the changelog. `bittern check` compares kernels with ref of today, the list with ref of before.
//
// The problems are those of `bittern check`: every check case, with the seed that check gives it,
// once with all operands and once with some optional ones left out, operands dense and apart. Only
// the names of ops and operands and the number of a case count: fields and files may be renamed,
// operands may change places.
//
// BITTERN_UPDATE_GOLDENS=1 build/release/bittern_test --gtest_filter='*ResultHashes*' rewrites it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "formats/fingerprint.h"
#include "oracle/oracle_impl.h"
#include "plan/any_op.h"

namespace bittern {
namespace {

using oracle::Problem;
using oracle::Store;

const std::filesystem::path kGolden = BITTERN_GOLDEN;
// What no kernel writes holds this byte, whatever the oracle's poison is.
constexpr std::byte kUnwritten{0x5A};

struct CaseHash {
  std::uint64_t inputs = 0, outputs = 0;
};

struct OpHashes {
  std::vector<CaseHash> cases;
  std::vector<std::string> repeat;  // the command that repeats each case
};

// A line of the list: the hashes of all cases, and 16 bits of each case, which name the first that
// differs.
struct Entry {
  std::size_t cases = 0;
  std::uint64_t inputs = 0, outputs = 0;
  std::vector<std::uint16_t> short_inputs, short_outputs;

  bool operator==(const Entry&) const = default;
};
using List = std::map<std::string, Entry, std::less<>>;

std::span<std::byte> elements(Store& s) {
  const auto numel = static_cast<std::size_t>(s.expected.shape.numel());
  return std::span(s.bytes).subspan(s.offset, numel * size_of(s.expected.dtype));
}

// The elements alone: what lies around them is the oracle's. All NaN of a float operand count as
// one, as in `bittern check`: their sign and payload are the processor's, and nothing promises
// them.
void add(Fingerprint& hash, std::size_t number, const Store& store) {
  Store copy = store;
  oracle::canonicalise_nans(copy);
  hash.add(number);
  hash.add(elements(copy));
}

// Those given, in the order of their names.
std::vector<Store*> by_name(std::vector<Store>& stores) {
  std::vector<Store*> sorted;
  for (Store& s : stores)
    if (s.present) sorted.push_back(&s);
  std::ranges::sort(sorted, {}, [](const Store* s) { return s->name; });
  return sorted;
}

// Called for every problem, before and after it is run.
using Change = std::function<void(std::size_t index, std::vector<Store>& stores)>;

// Adds a problem and what the plan makes of it; tells whether there are outputs.
template <class Op>
bool add_problem(const Plan<Op>& plan, std::size_t index, Problem<Op> p, const Change& before,
                 const Change& after, Fingerprint& inputs, Fingerprint& outputs) {
  if (before) before(index, p.stores);
  const std::vector<Store*> stores = by_name(p.stores);
  for (std::size_t number = 0; number < stores.size(); ++number) {
    Store& s = *stores[number];
    const bool read = !s.output || (s.expected.flags & Operand::kInOut) != 0;
    if (read) {
      add(inputs, number, s);
    } else {
      std::ranges::fill(elements(s), kUnwritten);
    }
  }
  // A refusal has no outputs: that it is one is the result, its words are not.
  Status status = plan.can_implement(p.args);
  if (status.ok())
    status = oracle::run_on(Device{}, p, plan.workspace_bytes(),
                            [&](const auto& args, Workspace w) { return plan.run(args, {}, w); });
  if (after) after(index, p.stores);
  outputs.add(status.ok() ? 1 : 0);
  if (!oracle::has_outputs<Op>(status)) return false;
  for (std::size_t number = 0; number < stores.size(); ++number)
    if (stores[number]->output) add(outputs, number, *stores[number]);
  return true;
}

// Layout::left_out, whose bits follow the operands, for a mask over the optional ones by name.
int left_out(std::vector<Store>& all, int mask) {
  std::vector<std::string> optional;  // in their order
  for (const Store& s : all)
    if ((s.expected.flags & Operand::kOptional) != 0 && s.present && s.expected.shape.numel() != 0)
      optional.push_back(s.name);
  std::vector<std::string> sorted = optional;
  std::ranges::sort(sorted);
  int bits = 0;
  for (std::size_t i = 0; i < optional.size(); ++i) {
    const auto at = std::ranges::find(sorted, optional[i]) - sorted.begin();
    bits |= (mask >> at & 1) << i;
  }
  return bits;
}

template <class Op>
OpHashes hashes(std::string_view kernel = "ref", const Change& before = {},
                const Change& after = {}) {
  OpHashes out;
  const auto cases = oracle::Cases<Op>::check();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::uint64_t seed = oracle::Settings{}.seed + i;
    auto plan = Plan<Op>::select(cases[i], {}, Preference::exact, kernel);
    if (!plan && plan.status().code() == Code::unsupported)
      plan = Plan<Op>::select(cases[i], {}, Preference::exact, "ref");
    out.repeat.push_back("bittern check " + std::string(Op::kName) + " " +
                         flags_text<Op>(cases[i]) + " --seed=" + std::to_string(seed));
    Fingerprint inputs, outputs;
    if (plan) {
      auto all = oracle::make_problem<Op>(cases[i], seed, {});
      const int optional = left_out(all.stores, -1);  // a bit for each
      // The masks take turns. One that leaves out all outputs is refused.
      const int layout =
          optional == 0 ? 0 : left_out(all.stores, 1 + static_cast<int>(i) % optional);
      EXPECT_TRUE(add_problem(*plan, i, std::move(all), before, after, inputs, outputs))
          << out.repeat.back();
      if (layout != 0) {
        (void)add_problem(*plan, i, oracle::make_problem<Op>(cases[i], seed, {.left_out = layout}),
                          before, after, inputs, outputs);
      }
    } else {
      ADD_FAILURE() << out.repeat.back() << ": " << plan.status().message();
    }
    out.cases.push_back({inputs.value(), outputs.value()});
  }
  return out;
}

OpHashes hashes_of(std::string_view op, std::string_view kernel) {
#define BITTERN_OP(T, f, CPU, CUDA) \
  if (op == T::kName) return hashes<T>(kernel);
#include "ops/ops.inc"
  return {};
}

// The top of a product: it depends on every bit, as the low bits of a fingerprint do not.
std::uint16_t shortened(std::uint64_t hash) {
  return static_cast<std::uint16_t>(hash * 0x9e3779b97f4a7c15 >> 48);
}

Entry entry_of(const OpHashes& op) {
  Entry entry;
  Fingerprint inputs, outputs;
  for (const CaseHash& c : op.cases) {
    inputs.add(c.inputs);
    outputs.add(c.outputs);
    entry.short_inputs.push_back(shortened(c.inputs));
    entry.short_outputs.push_back(shortened(c.outputs));
  }
  entry.cases = op.cases.size();
  entry.inputs = inputs.value();
  entry.outputs = outputs.value();
  return entry;
}

// How an op differs from the list, as text; empty: not at all.
std::string difference(std::string_view op, const Entry& listed, const OpHashes& got) {
  const Entry now = entry_of(got);
  if (now == listed) return {};
  std::string text(op);
  if (now.cases != listed.cases)
    text +=
        ": " + std::to_string(now.cases) + " cases, the list has " + std::to_string(listed.cases);
  // Where the inputs are others, so are the outputs: that says nothing of the op.
  const bool inputs = now.inputs != listed.inputs;
  const auto& ours = inputs ? now.short_inputs : now.short_outputs;
  const auto& theirs = inputs ? listed.short_inputs : listed.short_outputs;
  std::size_t count = 0, first = 0;
  for (std::size_t i = std::min(ours.size(), theirs.size()); i-- > 0;) {
    if (ours[i] == theirs[i]) continue;
    ++count;
    first = i;
  }
  if (count == 0)
    return text + (now.cases != listed.cases
                       ? ", those of both are the same"
                       : ": the hash of all cases differs, that of none does");
  return text + ": case " + std::to_string(first) + ": " +
         (inputs ? "the inputs changed" : "the results changed, the inputs did not") + " (" +
         std::to_string(count) + " of " + std::to_string(listed.cases) + " cases)   " +
         got.repeat[first];
}

// ---- the file ----

std::string hex(std::uint64_t value, int digits) {
  char text[17];
  std::snprintf(text, sizeof text, "%0*llx", digits, static_cast<unsigned long long>(value));
  return text;
}

constexpr const char* kOpening =
    "# What ref computes (tests/result_hashes_test.cc). For each op: its name, the number of its\n"
    "# check cases, a hash of all inputs, a hash of all outputs. Then 16 bits of each case's "
    "hashes,\n"
    "# inputs:outputs, to name the first that differs.\n";

std::string text_of(const List& list) {
  std::string text = kOpening;
  for (const auto& [op, entry] : list) {
    text += op + " " + std::to_string(entry.cases) + " " + hex(entry.inputs, 16) + " " +
            hex(entry.outputs, 16) + "\n";
    for (std::size_t i = 0; i < entry.cases; ++i)
      text += (i % 10 == 0 ? i == 0 ? " " : "\n " : "") + (" " + hex(entry.short_inputs[i], 4)) +
              ":" + hex(entry.short_outputs[i], 4);
    text += "\n";
  }
  return text;
}

Result<List> read_list(std::istream& file) {
  List list;
  Entry* last = nullptr;
  std::size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const auto wrong = [&] { return invalid("line " + std::to_string(number) + ": " + line); };
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    if (line[0] != ' ') {
      std::string op;
      Entry entry;
      if (!(words >> op >> entry.cases >> std::hex >> entry.inputs >> entry.outputs))
        return wrong();
      last = &(list[op] = entry);
      continue;
    }
    for (std::string word; words >> word;) {
      unsigned inputs = 0, outputs = 0;
      if (last == nullptr || std::sscanf(word.c_str(), "%4x:%4x", &inputs, &outputs) != 2)
        return wrong();
      last->short_inputs.push_back(static_cast<std::uint16_t>(inputs));
      last->short_outputs.push_back(static_cast<std::uint16_t>(outputs));
    }
  }
  for (const auto& [op, entry] : list)
    if (entry.short_inputs.size() != entry.cases)
      return invalid(op + ": " + std::to_string(entry.short_inputs.size()) + " hashes of cases");
  return list;
}

Result<List> read_list() {
  std::ifstream file(kGolden / "results.txt");
  if (!file) return unavailable("tests/golden/results.txt: cannot read");
  return read_list(file);
}

void write_list(const List& list) {
  std::ofstream file(kGolden / "results.txt");
  file << text_of(list);
  EXPECT_TRUE(file.flush()) << "tests/golden/results.txt: cannot write";
}

bool updating() {
  const char* text = std::getenv("BITTERN_UPDATE_GOLDENS");
  return text != nullptr && std::string_view(text) != "" && std::string_view(text) != "0";
}

// Where the test was carried to another machine, there are no sources to compare with.
#define NEEDS_GOLDENS() \
  if (!std::filesystem::exists(kGolden)) GTEST_SKIP() << kGolden << ": not here"

// ---- the tests ----

class ResultHashes : public testing::TestWithParam<std::string> {};

TEST_P(ResultHashes, AreThoseOfTheList) {
  NEEDS_GOLDENS();
  const std::string& op = GetParam();
  const OpHashes got = hashes_of(op, "ref");
  auto list = read_list();
  if (updating()) {
    List updated = list ? *list : List{};
    updated[op] = entry_of(got);
    write_list(updated);
    return;
  }
  ASSERT_TRUE(list) << list.status().message();
  ASSERT_TRUE(list->contains(op)) << op << ": not in tests/golden/results.txt";
  EXPECT_EQ(difference(op, list->at(op), got), "");
}

// The kernels of this machine, with the threads and the target that the environment asks for.
TEST_P(ResultHashes, AreThoseOfTheCpuToo) {
  NEEDS_GOLDENS();
  const std::string& op = GetParam();
  const auto list = read_list();
  if (updating()) GTEST_SKIP() << "the list is that of ref";
  ASSERT_TRUE(list) << list.status().message();
  ASSERT_TRUE(list->contains(op)) << op << ": not in tests/golden/results.txt";
  EXPECT_EQ(difference(op, list->at(op), hashes_of(op, "cpu")), "");
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const AnyOp* op : all_ops()) all.emplace_back(op->name());
  return all;
}

INSTANTIATE_TEST_SUITE_P(EveryOp, ResultHashes, testing::ValuesIn(names()),
                         [](const auto& op) { return op.param; });

TEST(ResultHashesList, HasNoOtherOps) {
  NEEDS_GOLDENS();
  auto list = read_list();
  const auto gone = [](const auto& line) { return !find_op(line.first); };
  if (updating()) {
    if (!list) return;
    std::erase_if(*list, gone);
    return write_list(*list);
  }
  ASSERT_TRUE(list) << list.status().message();
  for (const auto& line : *list) EXPECT_FALSE(gone(line)) << line.first;
}

TEST(ResultHashesList, ReadsWhatItWrites) {
  const OpHashes op = hashes<PackCodes>();
  const List list{{"a", entry_of(op)}, {"pack_codes", entry_of(op)}};
  std::istringstream text(text_of(list));
  const auto back = read_list(text);
  ASSERT_TRUE(back) << back.status().message();
  EXPECT_EQ(*back, list);
}

// One flipped bit, in the last byte of an operand of case 3.
Change flip(bool output) {
  return [output](std::size_t index, std::vector<Store>& stores) {
    if (index != 3) return;
    for (Store& s : stores)
      if (s.present && s.output == output && !elements(s).empty()) {
        elements(s).back() ^= std::byte{1};
        return;
      }
  };
}

template <class Op>
void expect_seen() {
  const Entry listed = entry_of(hashes<Op>());
  const std::string op(Op::kName);
  EXPECT_EQ(difference(op, listed, hashes<Op>()), "");
  const std::string result = difference(op, listed, hashes<Op>("ref", {}, flip(true)));
  EXPECT_TRUE(result.starts_with(op + ": case 3: the results changed, the inputs did not (1 of "))
      << result;
  EXPECT_NE(result.find("bittern check " + op + " --"), result.npos) << result;
  EXPECT_NE(result.find(" --seed=4"), result.npos) << result;
  const std::string input = difference(op, listed, hashes<Op>("ref", flip(false)));
  EXPECT_TRUE(input.starts_with(op + ": case 3: the inputs changed (1 of ")) << input;
}

TEST(ResultHashesList, TellsAFlippedBit) {
  expect_seen<PackCodes>();
  expect_seen<QuantizePerGroup>();
  expect_seen<AuraRotate>();
}

TEST(ResultHashesList, TellsCasesThatAreNew) {
  OpHashes op = hashes<PackCodes>();
  const Entry listed = entry_of(op);
  op.cases.push_back({1, 2});
  op.repeat.emplace_back();
  const std::string cases = std::to_string(listed.cases);
  EXPECT_EQ(difference("pack_codes", listed, op),
            "pack_codes: " + std::to_string(listed.cases + 1) + " cases, the list has " + cases +
                ", those of both are the same");
}

TEST(ResultHashesList, TakesEveryNanForOne) {
  const auto hash = [](std::uint32_t bits) {
    Store s;
    s.expected.dtype = DType::f32;
    s.expected.shape = {{"1", 1}};
    s.shape = s.expected.shape;
    s.stride = Shape{1};
    s.bytes.resize(4);
    std::memcpy(s.bytes.data(), &bits, 4);
    Fingerprint sum;
    add(sum, 0, s);
    return sum.value();
  };
  EXPECT_EQ(hash(0x7fc00000), hash(0xffc00001));
  EXPECT_NE(hash(0x7fc00000), hash(0x7f800000));
  EXPECT_NE(hash(0), hash(0x80000000));
}

}  // namespace
}  // namespace bittern
