// What a session's layers remember.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bittern/kv_cache.h"
#include "bittern/model.h"
#include "model/decoder.h"
#include "model/memory.h"

namespace bittern {

// Keys and values as they are: [kv_heads, capacity, dim] each. It grows with the session.
struct PlainCache {
  DType dtype = DType::f16;
  std::int64_t capacity = 0;  // tokens
  LargePages k{}, v{};
};

struct DeltaState {
  std::vector<float> conv;   // [channels, width - 1]
  std::vector<float> state;  // [value_heads, key_dim, value_dim]
};

struct LayerState {
  std::optional<PlainCache> plain;
  std::optional<KvCache> coded;
  std::optional<DeltaState> delta;
};

// States of the gated delta layers after `size` tokens.
struct SavedDelta {
  std::int64_t size = 0;
  std::vector<DeltaState> layers = {};
};

struct SessionData {
  std::shared_ptr<const ModelData> model;
  SessionOptions options;
  std::int64_t context = 0;
  std::vector<std::int32_t> tokens;
  std::vector<LayerState> layers;
  std::vector<SavedDelta> saved;  // ascending; those of the newest appends
  Scratch scratch;                // of passes that begin with this session

  std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
  void save_delta();
  Status reserve(std::int64_t tokens);  // room in plain caches
};

}  // namespace bittern
