// Every pair of options: used together, or refused together.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "convert/conversion.h"
#include "convert/mix.h"
#include "convert/option_names.h"
#include "formats/test_folder.h"

namespace bittern {
namespace {

using Set = std::function<void(ConversionOptions&)>;

struct Option {
  std::string field;
  Set set;
  // The ways and formats in which it has an effect: q(uantise), t(ranscode), d(equantise), c(ast);
  // g(guf), f(olders).
  std::string ways, formats;
};

const std::vector<Option>& options() {
  static const std::vector<Option> all = {
      {"bits", [](auto& o) { o.bits = 4; }, "q", "gf"},
      {"type", [](auto& o) { o.mix = find_mix("Q8_0"); }, "q", "g"},
      {"target_bpw", [](auto& o) { o.target_bpw = 9; }, "q", "gf"},
      {"group_size", [](auto& o) { o.group = 32; }, "q", "gf"},
      {"method", [](auto& o) { o.method = AffineMethod::lsq; }, "q", "gf"},
      {"rules", [](auto& o) { o.rules = {{.pattern = "b", .keep = true}}; }, "q", "gf"},
      {"imatrix", [](auto& o) { o.imatrix = "/nowhere"; }, "q", "gf"},
      {"pure", [](auto& o) { o.pure = true; }, "q", "gf"},
      {"allow_requantize", [](auto& o) { o.allow_requantize = true; }, "q", "gf"},
      {"transcode", [](auto& o) { o.transcode = true; }, "t", "gf"},
      {"lossy", [](auto& o) { o.lossy = true; }, "qtdc", "gf"},
      {"scale_dtype", [](auto& o) { o.scale_dtype = SafeDType::f32; }, "qt", "f"},
      {"dequantize", [](auto& o) { o.dequantize = SafeDType::f32; }, "d", "gf"},
      {"dtype", [](auto& o) { o.dtype = SafeDType::f32; }, "qc", "gf"},
      {"output_tensor_type", [](auto& o) { o.output_type = GgmlType::q8_0; }, "q", "g"},
      {"token_embedding_type", [](auto& o) { o.embedding_type = GgmlType::q8_0; }, "q", "g"},
      {"leave_output_tensor", [](auto& o) { o.leave_output = true; }, "q", "gf"},
      {"split_max_size", [](auto& o) { o.split_bytes = 1000000; }, "qtdc", "g"},
      {"split_max_tensors", [](auto& o) { o.split_tensors = 2; }, "qtdc", "g"},
  };
  return all;
}

const std::pair<const char*, const char*> kContradict[] = {
    {"bits", "type"},
    {"bits", "target_bpw"},
    {"type", "target_bpw"},
    {"type", "group_size"},
    {"output_tensor_type", "leave_output_tensor"},
    {"split_max_size", "split_max_tensors"}};

class OptionPairs : public TestFolder {
 protected:
  void SetUp() override {
    TestFolder::SetUp();
    put_model("hf", {{"a.weight", {2, 64}, std::vector<float>(128, 1)}});
  }
  // Why the options are refused; empty where they are not.
  std::string refusal(const ConversionOptions& options) const {
    const auto model = Checkpoint::open(path("hf"));
    EXPECT_TRUE(model);
    const auto plan =
        Conversion::plan(*model, options, "out", [](const ModelProgress&) { return true; });
    if (plan) return "";
    const std::string message = with_option_names(plan.status().message(), {});
    // The model itself has no GGUF form, and there is no such matrix: the options passed.
    const bool later = message.find("nobodys") != message.npos ||
                       message.find("/nowhere") != message.npos ||
                       message.find("model_type") != message.npos;
    return later ? "" : message;
  }
};

TEST_F(OptionPairs, AreUsedOrRefused) {
  const std::pair<char, Set> ways[] = {{'q', [](auto& o) { o.bits = 4; }},
                                       {'q', [](auto& o) { o.mix = find_mix("Q8_0"); }},
                                       {'q', [](auto& o) { o.target_bpw = 9; }},
                                       {'t', [](auto& o) { o.transcode = true; }},
                                       {'d', [](auto& o) { o.dequantize = SafeDType::f32; }},
                                       {'c', [](auto& o) { o.dtype = SafeDType::f32; }}};
  int accepted = 0, refused = 0;
  for (const auto& [way, set_way] : ways) {
    for (const Option& a : options()) {
      for (const Option& b : options()) {
        for (const char format : {'g', 'f'}) {
          ConversionOptions o{.format = format == 'g' ? ModelFormat::gguf : ModelFormat::mlx};
          set_way(o);
          char now = way;
          a.set(o);
          b.set(o);
          // dtype alone is a way of its own until something else is one.
          if (now == 'c') {
            if (o.bits > 0 || o.mix != nullptr || o.target_bpw > 0) now = 'q';
            if (o.transcode) now = 't';
            if (o.dequantize) now = 'd';
          }
          const auto fits = [&](const Option& x) {
            return x.ways.find(now) != x.ways.npos && x.formats.find(format) != x.formats.npos;
          };
          bool fine = true;
          std::string given = " ";
          const auto has = [&](const std::string& field) {
            return given.find(" " + field + " ") != given.npos;
          };
          for (const Option& x : options()) {
            ConversionOptions alone;
            x.set(alone);
            const bool is =
                (alone.bits > 0 && o.bits > 0) || (alone.mix != nullptr && o.mix != nullptr) ||
                (alone.target_bpw > 0 && o.target_bpw > 0) || (alone.group > 0 && o.group > 0) ||
                (alone.method && o.method) || (!alone.rules.empty() && !o.rules.empty()) ||
                (!alone.imatrix.empty() && !o.imatrix.empty()) || (alone.pure && o.pure) ||
                (alone.allow_requantize && o.allow_requantize) ||
                (alone.transcode && o.transcode) || (alone.lossy && o.lossy) ||
                (alone.scale_dtype && o.scale_dtype) || (alone.dequantize && o.dequantize) ||
                (alone.dtype && o.dtype) || (alone.output_type && o.output_type) ||
                (alone.embedding_type && o.embedding_type) ||
                (alone.leave_output && o.leave_output) ||
                (alone.split_bytes > 0 && o.split_bytes > 0) ||
                (alone.split_tensors > 0 && o.split_tensors > 0);
            if (!is) continue;
            given += x.field + " ";
            fine = fine && fits(x);
            for (const auto& [one, other] : kContradict)
              fine = fine && !(x.field == one && has(other)) && !(x.field == other && has(one));
          }
          const std::string why = refusal(o);
          EXPECT_EQ(why.empty(), fine) << format << given << ": " << why;
          ++(fine ? accepted : refused);
        }
      }
    }
  }
  EXPECT_GT(accepted, 300);
  EXPECT_GT(refused, 1000);
}

TEST_F(OptionPairs, NameBothFields) {
  EXPECT_EQ(refusal({.bits = 4, .transcode = true}),
            "bits and transcode exclude each other, expected one");
  EXPECT_EQ(refusal({.group = 32, .transcode = true}),
            "group_size: has no effect with transcode; leave one of them out");
  EXPECT_EQ(refusal({.bits = 4, .target_bpw = 5}), "bits and target_bpw both given, expected one");
}

TEST_F(OptionPairs, TargetsMustBeNumbers) {
  for (const double target :
       {std::nan(""), std::numeric_limits<double>::infinity(), -3.0, 0.5, 33.0})
    EXPECT_NE(refusal({.target_bpw = target}).find("expected 1 to 32"), std::string::npos);
}

TEST_F(OptionPairs, RulesSayOneThing) {
  for (const TensorRule& rule : {TensorRule{.pattern = "a", .keep = true, .bits = 4},
                                 TensorRule{.pattern = "a", .bits = 4, .type = GgmlType::q8_0},
                                 TensorRule{.pattern = "a", .keep = true, .type = GgmlType::q8_0}})
    EXPECT_NE(
        refusal({.format = ModelFormat::gguf, .bits = 4, .rules = {rule}}).find("says one of"),
        std::string::npos);
}

}  // namespace
}  // namespace bittern
