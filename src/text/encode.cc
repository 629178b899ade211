// Text to tokens.
#include <utf8proc.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "text/tables.h"
#include "text/utf8.h"

namespace bittern::text {

// ---- added tokens ----

void TextTrie::put(std::string_view text, std::uint32_t value) {
  std::int32_t* link = &first_[static_cast<unsigned char>(text[0])];
  std::int32_t node = -1;
  for (const char byte : text) {
    while (*link >= 0 && nodes_[static_cast<std::size_t>(*link)].byte != byte)
      link = &nodes_[static_cast<std::size_t>(*link)].sibling;
    if (*link < 0) {
      *link = static_cast<std::int32_t>(nodes_.size());
      node = *link;
      nodes_.push_back({.byte = byte});  // `link` is of no use from here on
    } else {
      node = *link;
    }
    link = &nodes_[static_cast<std::size_t>(node)].child;
  }
  nodes_[static_cast<std::size_t>(node)].value = static_cast<std::int32_t>(value);
}

namespace {

bool is_space(std::string_view letter) {
  utf8proc_int32_t point = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(letter.data()),
                   static_cast<utf8proc_ssize_t>(letter.size()), &point);
  if ((point >= 9 && point <= 13) || point == 0x85) return true;
  const utf8proc_category_t category = utf8proc_category(point);
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

bool is_word_letter(std::string_view letter) {
  utf8proc_int32_t point = 0;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(letter.data()),
                   static_cast<utf8proc_ssize_t>(letter.size()), &point);
  switch (utf8proc_category(point)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
  }
}

std::string_view letter_at(std::string_view text, std::size_t at) {
  return text.substr(at, std::max<std::size_t>(character(text, at), 1));
}
std::string_view letter_before(std::string_view text, std::size_t end) {
  std::size_t begin = end - 1;
  while (begin > 0 && end - begin < 4 && (text[begin] & 0xc0) == 0x80) --begin;
  return text.substr(begin, end - begin);
}

}  // namespace

bool TokenizerTables::Controls::allow(std::size_t begin, std::size_t end) const {
  if (ranges.empty()) return everywhere;
  const auto next = std::ranges::upper_bound(ranges, begin, {}, &Range::begin);
  return next != ranges.begin() && end <= std::prev(next)->end;
}

// As Hugging Face's tokenizers: from left to right, the longest at each place.
std::vector<TokenizerTables::Fragment> TokenizerTables::find_added(std::string_view text,
                                                                   const TextTrie& trie,
                                                                   const Controls& controls) const {
  std::vector<Fragment> fragments;
  std::size_t done = 0;  // the text before it is in fragments
  for (std::size_t at = 0; at < text.size() && !trie.empty();) {
    const AddedText* token = nullptr;
    std::size_t size = 0;
    trie.each(text.substr(at), [&](std::uint32_t i, std::size_t bytes) {
      if (!controls.ranges.empty() && added[i].control && !controls.allow(at, at + bytes)) return;
      token = &added[i];
      size = bytes;
    });
    if (token == nullptr) {
      ++at;
      continue;
    }
    std::size_t begin = at, end = at + size;
    at = end;
    if (controls.ranges.empty() && token->special && !controls.everywhere) continue;
    if (token->single_word && ((begin > 0 && is_word_letter(letter_before(text, begin))) ||
                               (end < text.size() && is_word_letter(letter_at(text, end)))))
      continue;
    if (token->lstrip)
      while (begin > done && is_space(letter_before(text, begin)))
        begin -= letter_before(text, begin).size();
    if (token->rstrip)
      while (end < text.size() && is_space(letter_at(text, end)))
        end += letter_at(text, end).size();
    if (begin > done) fragments.push_back({text.substr(done, begin - done)});
    fragments.push_back({text.substr(begin, end - begin), token->id});
    done = end;
    at = std::max(at, done);
  }
  if (done < text.size()) fragments.push_back({text.substr(done)});
  return fragments;
}

// As llama.cpp: the longest token first, wherever it is; of equally long ones that of the lower id.
std::vector<TokenizerTables::Fragment> TokenizerTables::partition(std::string_view text,
                                                                  const Controls& controls) const {
  struct Found {
    std::size_t begin, end;
    std::uint32_t token;
  };
  std::vector<Found> all;
  for (std::size_t at = 0; at < text.size() && !added_trie_.empty(); ++at)
    added_trie_.each(text.substr(at), [&](std::uint32_t i, std::size_t bytes) {
      const bool control = controls.ranges.empty() ? added[i].special : added[i].control;
      if (!control || controls.allow(at, at + bytes)) all.push_back({at, at + bytes, i});
    });
  if (all.empty()) return text.empty() ? std::vector<Fragment>() : std::vector<Fragment>{{text}};
  std::ranges::sort(all, [](const Found& a, const Found& b) {
    const std::size_t first = a.end - a.begin, second = b.end - b.begin;
    return std::tuple(second, a.token, a.begin) < std::tuple(first, b.token, b.begin);
  });
  std::vector<bool> taken(text.size(), false);
  std::vector<Found> kept;
  const auto blank = [&](std::size_t i) {
    return !taken[i] && std::isspace(static_cast<unsigned char>(text[i])) != 0;
  };
  for (Found found : all) {
    const auto first = taken.begin() + static_cast<std::ptrdiff_t>(found.begin);
    const auto last = taken.begin() + static_cast<std::ptrdiff_t>(found.end);
    if (std::find(first, last, true) != last) continue;
    if (added[found.token].lstrip)
      while (found.begin > 0 && blank(found.begin - 1)) --found.begin;
    if (added[found.token].rstrip)
      while (found.end < text.size() && blank(found.end)) ++found.end;
    std::fill(taken.begin() + static_cast<std::ptrdiff_t>(found.begin),
              taken.begin() + static_cast<std::ptrdiff_t>(found.end), true);
    kept.push_back(found);
  }
  std::ranges::sort(kept, {}, &Found::begin);
  std::vector<Fragment> fragments;
  std::size_t done = 0;
  for (const Found& found : kept) {
    if (found.begin > done) fragments.push_back({text.substr(done, found.begin - done)});
    fragments.push_back({text.substr(found.begin, found.end - found.begin), added[found.token].id});
    done = found.end;
  }
  if (done < text.size()) fragments.push_back({text.substr(done)});
  return fragments;
}

// ---- normalisation ----

namespace {

Status normalize(const std::string& where, std::span<const Normalizer> steps, std::string& text) {
  for (const Normalizer& step : steps) {
    if (step.kind == Normalizer::Kind::prepend) {
      if (!text.empty()) text.insert(0, step.to);
      continue;
    }
    if (step.kind == Normalizer::Kind::replace) {
      std::string out;
      std::size_t from = 0;
      for (std::size_t at; (at = text.find(step.from, from)) != text.npos;) {
        out.append(text, from, at - from).append(step.to);
        from = at + step.from.size();
      }
      text = from == 0 ? std::move(text) : out.append(text, from, text.npos);
      continue;
    }
    if (std::ranges::all_of(text, [](char c) { return (c & 0x80) == 0; })) continue;
    const bool compose = step.kind == Normalizer::Kind::nfc || step.kind == Normalizer::Kind::nfkc;
    const bool compat = step.kind == Normalizer::Kind::nfkc || step.kind == Normalizer::Kind::nfkd;
    const auto options = static_cast<utf8proc_option_t>(
        UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
        (compat ? UTF8PROC_COMPAT : 0));
    utf8proc_uint8_t* made = nullptr;
    const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                   static_cast<utf8proc_ssize_t>(text.size()), &made, options);
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, &std::free);
    if (size < 0)
      return {size == UTF8PROC_ERROR_NOMEM ? Code::out_of_memory : Code::internal,
              where + "normalising: " + utf8proc_errmsg(size)};
    text.assign(reinterpret_cast<const char*>(made), static_cast<std::size_t>(size));
  }
  return {};
}

}  // namespace

// ---- byte-level BPE ----

// The tokens of words that were met before in this text.
struct TokenizerTables::WordCache {
  struct Range {
    std::uint32_t begin, size;
  };
  struct Hash {
    std::size_t operator()(std::string_view text) const {
      std::uint64_t hash = text.size() * 0x9E3779B97F4A7C15u;
      std::size_t i = 0;
      for (; i + 8 <= text.size(); i += 8) hash = mix(hash ^ load(text, i, 8));
      if (i < text.size()) hash = mix(hash ^ load(text, i, text.size() - i));
      return hash;
    }
    static std::uint64_t load(std::string_view text, std::size_t at, std::size_t size) {
      std::uint64_t bytes = 0;
      text.copy(reinterpret_cast<char*>(&bytes), size, at);
      return bytes;
    }
    static std::uint64_t mix(std::uint64_t x) {
      x *= 0xD6E8FEB86659FD93u;
      return x ^ x >> 32;
    }
  };
  std::unordered_map<std::string_view, Range, Hash> words;
  std::vector<std::int32_t> ids;
  std::vector<std::string_view> pieces;
  std::vector<std::uint32_t> word, part;
  std::vector<std::string> kept;  // text that words are views of
};

void TokenizerTables::put_unknown(std::string_view letter, std::vector<std::uint32_t>& ids) const {
  const auto has_byte = [&](char c) { return byte_ids[static_cast<unsigned char>(c)] >= 0; };
  if (kind != Kind::byte_level && std::ranges::all_of(letter, has_byte)) {
    for (const char c : letter)
      ids.push_back(static_cast<std::uint32_t>(byte_ids[static_cast<unsigned char>(c)]));
    return;
  }
  const auto id = static_cast<std::uint32_t>(unknown);
  if (unknown < 0 || (fuse_unknown && !ids.empty() && ids.back() == id)) return;
  ids.push_back(id);
}

Status TokenizerTables::encode_bytes(std::string_view text, WordCache& words,
                                     std::vector<std::int32_t>& ids) const {
  BITTERN_TRY(cutter.cut(text, words.pieces));
  for (const std::string_view piece : words.pieces) {
    const auto [entry, is_new] = words.words.try_emplace(piece);
    if (is_new) {
      std::vector<std::uint32_t>& word = words.word;
      word.clear();
      std::int64_t whole = -1;
      if (ignore_merges) {
        std::string spelled;
        for (const char c : piece) spelled += byte_letters()[static_cast<unsigned char>(c)];
        whole = find(spelled);
      }
      if (whole >= 0) {
        word.push_back(static_cast<std::uint32_t>(whole));
      } else {
        std::vector<std::uint32_t>& part = words.part;
        part.clear();
        const auto merge_part = [&] {
          merge_by_rank(merges, part);
          word.insert(word.end(), part.begin(), part.end());
          part.clear();
        };
        for (const char c : piece) {
          const std::int32_t id = byte_ids[static_cast<unsigned char>(c)];
          if (id >= 0) {
            part.push_back(static_cast<std::uint32_t>(id));
          } else if (like_llama_cpp) {  // a byte without a token is left out after merging
            merge_part();
          } else {  // and before it by `tokenizers`
            put_unknown(std::string_view(&c, 1), part);
          }
        }
        merge_part();
      }
      entry->second = {static_cast<std::uint32_t>(words.ids.size()),
                       static_cast<std::uint32_t>(word.size())};
      words.ids.insert(words.ids.end(), word.begin(), word.end());
    }
    const auto begin = words.ids.begin() + entry->second.begin;
    ids.insert(ids.end(), begin, begin + entry->second.size);
  }
  return {};
}

// ---- sentencepiece's BPE ----

void TokenizerTables::encode_letters(std::string_view text, std::vector<std::int32_t>& ids) const {
  std::vector<std::uint32_t> symbols;
  if (kind == Kind::scores) {
    std::vector<ScoredPiece> found;
    merge_by_score({views, scores, &index}, text, found);
    for (const ScoredPiece& piece : found) {
      if (piece.id >= 0) {
        symbols.push_back(static_cast<std::uint32_t>(piece.id));
      } else {
        put_unknown(piece.text, symbols);
      }
    }
  } else {
    const std::int64_t whole = ignore_merges ? find(text) : -1;
    if (whole >= 0) {
      symbols.push_back(static_cast<std::uint32_t>(whole));
    } else {
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t size = std::min(claimed_length(text[at]), text.size() - at);
        const std::string_view letter = text.substr(at, size);
        if (const std::int64_t id = find(letter); id >= 0) {
          symbols.push_back(static_cast<std::uint32_t>(id));
        } else {
          put_unknown(letter, symbols);
        }
        at += size;
      }
      merge_by_rank(merges, symbols);
    }
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

// ---- all of it ----

Status TokenizerTables::encode_fragment(std::string_view text, bool first, WordCache& words,
                                        std::vector<std::int32_t>& ids) const {
  if (kind == Kind::byte_level) return encode_bytes(text, words, ids);
  // One more space may be put before the text.
  const bool prefix =
      space_prefix == SpacePrefix::always || (space_prefix == SpacePrefix::first && first);
  std::string marked;
  marked.reserve(text.size() + 3);
  const bool has_space = text.starts_with(' ') || text.starts_with(kSpaceMark);
  if (prefix && !(prefix_unless_space && has_space)) marked += kSpaceMark;
  for (const char c : text) marks_spaces&& c == ' ' ? marked += kSpaceMark : marked += c;
  if (kind == Kind::scores) {
    encode_letters(marked, ids);
    return {};
  }
  BITTERN_TRY(cutter.cut(marked, words.pieces));
  for (const std::string_view piece : words.pieces) encode_letters(piece, ids);
  return {};
}

namespace {

Status check_size(std::size_t bytes) {
  if (bytes < std::size_t{1} << 31) return {};
  return invalid("encode: a text of " + std::to_string(bytes) + " bytes, expected less than 2^31");
}

}  // namespace

std::string_view TokenizerTables::as_utf8(std::string_view text, std::string& made) const {
  if (kind == Kind::scores || is_utf8(text)) return text;
  if (like_llama_cpp) return made = repaired(text);
  std::string rest(text);
  made = take_complete(rest);
  if (!rest.empty()) made += kReplacement;
  return made;
}

Status TokenizerTables::encode_text(std::string_view text, const Controls& controls,
                                    std::vector<std::int32_t>& ids) const {
  WordCache words;
  const bool chat = !controls.ranges.empty();
  const auto fragments = like_llama_cpp
                             ? partition(text, controls)
                             : find_added(text, chat ? chat_trie_ : added_trie_, controls);
  words.kept.reserve(fragments.size());  // views of short strings must not move
  for (const Fragment& fragment : fragments) {
    if (fragment.id >= 0) {
      ids.push_back(fragment.id);
      continue;
    }
    const bool first = fragment.text.data() == text.data();
    if (normalizers.empty() && normalized_trie_.empty()) {
      BITTERN_TRY(encode_fragment(fragment.text, first, words, ids));
      continue;
    }
    std::string& normal = words.kept.emplace_back(fragment.text);
    BITTERN_TRY(normalize(where("normalizer"), normalizers, normal));
    for (const Fragment& part : find_added(normal, chat ? normalized_plain_trie_ : normalized_trie_,
                                           {controls.everywhere})) {
      if (part.id >= 0) {
        ids.push_back(part.id);
      } else {
        BITTERN_TRY(
            encode_fragment(part.text, first && part.text.data() == normal.data(), words, ids));
      }
    }
  }
  return {};
}

Status TokenizerTables::encode(std::string_view text, const EncodeOptions& options,
                               std::vector<std::int32_t>& ids) const {
  BITTERN_TRY(check_size(text.size()));
  std::string made;
  text = as_utf8(text, made);
  BITTERN_TRY(check_size(text.size()));
  if (options.add_special) ids.insert(ids.end(), before.begin(), before.end());
  BITTERN_TRY(encode_text(text, {options.parse_special}, ids));
  if (options.add_special) ids.insert(ids.end(), after.begin(), after.end());
  return {};
}

Status TokenizerTables::encode_chat(std::span<const ChatPart> parts,
                                    std::vector<std::int32_t>& ids) const {
  std::string text;
  std::vector<Range> ranges;
  for (const ChatPart& part : parts) {
    const std::size_t begin = text.size();
    // Each for itself: a message that ends within a character takes nothing from the template.
    std::string made;
    text += as_utf8(part.text, made);
    if (part.of_template) ranges.push_back({begin, text.size()});
  }
  BITTERN_TRY(check_size(text.size()));
  return encode_text(text, {false, ranges}, ids);
}

}  // namespace bittern::text
