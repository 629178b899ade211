// A folder of safetensors: one file, or shards and the index that says what is in which.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/guarded.h"
#include "formats/json_events.h"
#include "formats/safetensors_detail.h"
#include "formats/side_file.h"

namespace bittern {

using namespace safetensors_detail;

namespace {

class IndexEvents : public JsonEvents {
 public:
  explicit IndexEvents(const std::string& where)
      : JsonEvents(where, where + ": not valid JSON"), where_(where) {}

  SafetensorsIndex index;
  bool seen_map = false;

 private:
  static constexpr std::size_t kMostEntries = std::size_t{1} << 20;

  Status begin(bool object) override {
    if (depth() > 1) return no_string();
    if (object) return {};
    return invalid(where_ + (depth() == 0 ? "" : ": weight_map") + ": a list, expected an object");
  }
  Status key(const std::string& text) override {
    if (depth() == 1) {
      if (text != "weight_map") {
        skip_value();
      } else if (std::exchange(seen_map, true)) {
        return invalid(where_ + ": weight_map: given twice, expected once");
      }
      return {};
    }
    if (index.weight_map.size() == kMostEntries) {
      return invalid(where_ + ": weight_map: more than " + std::to_string(kMostEntries) +
                     " entries, expected fewer");
    }
    BITTERN_TRY(check_name(where_, text));
    index.weight_map.emplace_back(text, 0u);
    return {};
  }
  Status scalar(const JsonScalar& value) override {
    if (depth() == 0) return invalid(where_ + ": " + value.what() + ", expected an object");
    if (depth() == 1)
      return invalid(where_ + ": weight_map: " + value.what() + ", expected an object");
    if (value.kind != JsonScalar::text) return no_string();
    const std::string& shard = *value.string;
    // A shard lies beside its index: nothing of the name may lead elsewhere.
    if (shard.empty() || shard == "." || shard == ".." ||
        shard.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      return invalid(tensor_in(where_, index.weight_map.back().first) + "shard " +
                     in_quotes(shard) + ", expected the name of a file beside the index");
    }
    auto at = std::lower_bound(
        order_.begin(), order_.end(), shard,
        [&](std::uint32_t i, const std::string& s) { return index.shards[i] < s; });
    if (at == order_.end() || index.shards[*at] != shard) {
      if (index.shards.size() == kSafetensorsMaxShards) {
        return invalid(where_ + ": weight_map: more than " + std::to_string(kSafetensorsMaxShards) +
                       " shards, expected fewer");
      }
      at = order_.insert(at, static_cast<std::uint32_t>(index.shards.size()));
      index.shards.push_back(shard);
    }
    index.weight_map.back().second = *at;
    return {};
  }
  Status end() override {
    if (depth() != 0) return {};
    // From the order of appearance to that of the names.
    std::vector<std::uint32_t> rank(order_.size());
    std::vector<std::string> sorted;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      rank[order_[i]] = static_cast<std::uint32_t>(i);
      sorted.push_back(std::move(index.shards[order_[i]]));
    }
    index.shards = std::move(sorted);
    for (auto& [tensor, shard] : index.weight_map) shard = rank[shard];
    return {};
  }
  Status no_string() const {
    return invalid(tensor_in(where_, index.weight_map.back().first) +
                   "shard: not a string, expected a file's name");
  }

  std::string where_;
  std::vector<std::uint32_t> order_;  // shards by name
};

}  // namespace

Result<SafetensorsIndex> parse_safetensors_index(const std::string& where,
                                                 std::span<const std::byte> json) {
  return guarded(where, [&]() -> Result<SafetensorsIndex> {
    if (json.size() > kSafetensorsMaxHeader) {
      return invalid(where + ": " + std::to_string(json.size()) + " bytes, expected at most " +
                     std::to_string(kSafetensorsMaxHeader));
    }
    IndexEvents events(where);
    BITTERN_TRY(events.parse(json));
    auto& map = events.index.weight_map;
    if (!events.seen_map || map.empty())
      return invalid(where + ": no weight_map with a tensor, expected one");
    std::sort(map.begin(), map.end());
    const auto twice = std::adjacent_find(
        map.begin(), map.end(), [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != map.end())
      return invalid(tensor_in(where, twice->first) + "given twice, expected once");
    return std::move(events.index);
  });
}

void SafetensorsFolder::sort_names() {
  by_name_.resize(size());
  std::iota(by_name_.begin(), by_name_.end(), 0u);
  std::sort(by_name_.begin(), by_name_.end(),
            [&](auto a, auto b) { return tensor(a).name < tensor(b).name; });
}

std::optional<std::size_t> SafetensorsFolder::find(std::string_view name) const {
  const auto at =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [&](std::uint32_t i, std::string_view n) { return tensor(i).name < n; });
  if (at == by_name_.end() || tensor(*at).name != name) return std::nullopt;
  return *at;
}

Result<SafetensorsFolder> SafetensorsFolder::open(const std::string& folder) {
  return guarded(folder, [&]() -> Result<SafetensorsFolder> {
    const std::string beside = with_slash(folder);
    SafetensorsFolder model;
    if (!is_there(beside + kIndex)) {
      if (!is_there(beside + kSingle)) {
        return unavailable(folder + ": neither " + kIndex + " nor " + kSingle + ", expected one");
      }
      auto file = SafetensorsFile::open(beside + kSingle);
      if (!file) return file.status();
      for (std::uint32_t i = 0; i < file->tensors().size(); ++i) model.entries_.push_back({0, i});
      model.files_.push_back(std::move(*file));
      model.sort_names();
      return model;
    }

    const auto text = MappedFile::open(beside + kIndex);
    if (!text) return text.status();
    const auto index = parse_safetensors_index(text->path(), text->bytes());
    if (!index) return index.status();
    for (const std::string& shard : index->shards) {
      auto file = SafetensorsFile::open(beside + shard);
      if (!file && file.status().code() == Code::unavailable) {
        return unavailable(std::string(file.status().message()) + ", expected a shard named by " +
                           kIndex);
      }
      if (!file) return file.status();
      model.files_.push_back(std::move(*file));
    }
    for (const auto& [name, shard] : index->weight_map) {
      const SafetensorsTensor* found = model.files_[shard].find(name);
      if (found == nullptr) {
        return invalid(tensor_in(text->path(), name) + "not in " + in_quotes(index->shards[shard]) +
                       ", where the index places it");
      }
      const auto number = found - model.files_[shard].tensors().data();
      model.entries_.push_back({shard, static_cast<std::uint32_t>(number)});
    }
    std::sort(model.entries_.begin(), model.entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.file, a.tensor) < std::tie(b.file, b.tensor);
    });
    model.sort_names();
    return model;
  });
}

}  // namespace bittern
