// Which chat template a text is.
#include <algorithm>
#include <cctype>
#include <iterator>

#include "text/chat.h"

namespace bittern::text {
namespace {

// ---- canonical form ----

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string literal(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else {
      if (c == '\'' || c == '\\') out += '\\';
      out += c;
    }
  }
  return out + "'";
}

// The text of a literal's inside.
std::string unescaped(std::string_view inside) {
  std::string out;
  for (std::size_t i = 0; i < inside.size(); ++i) {
    if (inside[i] == '\\' && i + 1 < inside.size()) {
      const char c = inside[++i];
      out += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
    } else {
      out += inside[i];
    }
  }
  return out;
}

using Words = std::vector<std::string>;

bool is_literal(const std::string& word) { return word.starts_with('\''); }

// Adds the words of an expression or statement.
void read_words(std::string_view inside, Words& words) {
  for (std::size_t i = 0; i < inside.size();) {
    const char c = inside[i];
    const std::size_t begin = i;
    if (is_space(c)) {
      ++i;
      continue;
    }
    if (c == '\'' || c == '"') {
      for (++i; i < inside.size() && inside[i] != c; ++i)
        if (inside[i] == '\\') ++i;
      i = std::min(i, inside.size());
      std::string text = unescaped(inside.substr(begin + 1, i - begin - 1));
      ++i;
      // 'a' + 'b' is 'ab'
      if (words.size() > 1 && words.back() == "+" && is_literal(words[words.size() - 2])) {
        words.pop_back();
        const std::string& before = words.back();
        text.insert(0, unescaped(std::string_view(before).substr(1, before.size() - 2)));
        words.pop_back();
      }
      words.push_back(literal(text));
      continue;
    }
    if (is_word(c)) {
      while (i < inside.size() && is_word(inside[i])) ++i;
    } else {
      const bool two = i + 1 < inside.size() && inside[i + 1] == '=' &&
                       std::string_view("=!<>").find(c) != std::string_view::npos;
      i += two ? 2 : 1;
    }
    words.emplace_back(inside.substr(begin, i - begin));
    // m['x'] is m.x
    const std::size_t n = words.size();
    if (n > 3 && words[n - 1] == "]" && words[n - 3] == "[" && is_literal(words[n - 2]) &&
        words[n - 2].size() > 2 &&
        std::all_of(words[n - 2].begin() + 1, words[n - 2].end() - 1, is_word) &&
        (is_word(words[n - 4].back()) || words[n - 4] == "]" || words[n - 4] == ")")) {
      const std::string name = words[n - 2].substr(1, words[n - 2].size() - 2);
      words.resize(n - 3);
      words.insert(words.end(), {".", name});
    }
    // message.content may be in a variable of that name
    if (words.size() > 2 && words.back() == "content" && words[words.size() - 2] == "." &&
        words[words.size() - 3] == "message") {
      words.resize(words.size() - 3);
      words.push_back("content");
    }
  }
}

std::string joined(const Words& words) {
  std::string out;
  for (const std::string& word : words) {
    if (!out.empty() && is_word(out.back()) && is_word(word.front())) out += ' ';
    out += word;
  }
  return out;
}

class Canonical {
 public:
  void put_text(std::string_view text) {
    if (text.empty()) return;
    put_output(literal(text));
  }
  void put_output(std::string_view expression) {
    if (!output_.empty()) output_.push_back("+");
    read_words(expression, output_);
  }
  void put_statement(std::string_view statement) {
    end_output();
    Words words;
    read_words(statement, words);
    out_ += "%" + joined(words) + "%";
  }
  std::string take() {
    end_output();
    return std::move(out_);
  }

 private:
  void end_output() {
    if (!output_.empty()) out_ += "{" + joined(output_) + "}";
    output_.clear();
  }
  std::string out_;
  Words output_;  // what is written without a statement between
};

}  // namespace

// As transformers reads a template: trim_blocks and lstrip_blocks are on.
std::string canonical_template(std::string_view jinja) {
  Canonical out;
  if (jinja.ends_with('\n')) jinja.remove_suffix(1);
  bool line_start = true;  // where the text before the next tag begins
  while (!jinja.empty()) {
    std::size_t open = jinja.find('{');
    while (open != jinja.npos && open + 1 < jinja.size() &&
           std::string_view("{%#").find(jinja[open + 1]) == std::string_view::npos)
      open = jinja.find('{', open + 1);
    if (open == jinja.npos || open + 1 >= jinja.size()) {
      out.put_text(jinja);
      break;
    }
    const char kind = jinja[open + 1];
    const char end[2] = {kind == '{' ? '}' : kind, '}'};
    std::string_view before = jinja.substr(0, open);
    // The end of the tag; one within a string does not count.
    std::size_t close = open + 2;
    char quote = 0;
    for (; close < jinja.size(); ++close) {
      const char c = jinja[close];
      if (quote != 0) {
        if (c == '\\') ++close;
        if (c == quote) quote = 0;
      } else if (kind != '#' && (c == '\'' || c == '"')) {
        quote = c;
      } else if (jinja.substr(close).starts_with(std::string_view(end, 2))) {
        break;
      }
    }
    std::string_view inside = jinja.substr(open + 2, std::min(close, jinja.size()) - open - 2);
    std::string_view after = jinja.substr(std::min(close + 2, jinja.size()));
    const bool block = kind != '{';
    if (inside.starts_with('-')) {
      while (!before.empty() && is_space(before.back())) before.remove_suffix(1);
    } else if (block && !inside.starts_with('+')) {
      std::size_t line = before.size();
      while (line > 0 && (before[line - 1] == ' ' || before[line - 1] == '\t')) --line;
      if (line > 0 ? before[line - 1] == '\n' : line_start) before = before.substr(0, line);
    }
    line_start = false;
    if (inside.ends_with('-')) {
      while (!after.empty() && is_space(after.front())) after.remove_prefix(1);
    } else if (block && after.starts_with('\n')) {
      after.remove_prefix(1);
      line_start = true;
    }
    if (inside.starts_with('-') || inside.starts_with('+')) inside.remove_prefix(1);
    if (inside.ends_with('-')) inside.remove_suffix(1);
    out.put_text(before);
    if (kind == '{') out.put_output(inside);
    if (kind == '%') out.put_statement(inside);
    jinja = after;
  }
  return out.take();
}

namespace {

// ---- formats ----

using System = ChatFormat::System;
using Thoughts = ChatFormat::Thoughts;

ChatFormat chatml() {
  return {.name = "chatml", .open = "<|im_start|>", .after_role = "\n", .close = "<|im_end|>\n"};
}
ChatFormat qwen(Thoughts thoughts) {
  ChatFormat format = chatml();
  format.name = "qwen";
  format.thoughts = thoughts;
  format.may_skip_thoughts = thoughts != Thoughts::kept;
  if (thoughts == Thoughts::qwen35) {
    format.trim = true;
    format.system = System::first;
    format.prompt_end = "<think>\n";
  }
  return format;
}
ChatFormat llama3(System system) {
  return {.name = "llama-3",
          .open = "<|start_header_id|>",
          .after_role = "<|end_header_id|>\n\n",
          .close = "<|eot_id|>",
          .system = system,
          .bos = true,
          .trim = true};
}
ChatFormat gemma(System system) {
  return {.name = "gemma",
          .open = "<start_of_turn>",
          .after_role = "\n",
          .close = "<end_of_turn>\n",
          .assistant = "model",
          .system = system,
          .bos = true,
          .trim = true,
          .alternates = true};
}

// ---- templates that are known from beginning to end ----

#define CHATML_PROMPT "%if add_generation_prompt%{'<|im_start|>assistant\\n'}%endif%"
#define CHATML_TURN "{'<|im_start|>'+message.role+'\\n'+content+'<|im_end|>\\n'}"
#define CHATML_DEFAULT "{'<|im_start|>system\\n\x02<|im_end|>\\n'}"
#define LLAMA3_TURN \
  "'<|start_header_id|>'+message.role+'<|end_header_id|>\\n\\n'+content|trim+'<|eot_id|>'"
#define LLAMA3_HEADER "{'<|start_header_id|>assistant<|end_header_id|>\\n\\n'}"
#define LLAMA3_LOOP                                                                     \
  "%set loop_messages=messages%%for message in loop_messages%%set content=" LLAMA3_TURN \
  "%%if loop.index0==0%%set content=bos_token+content%%endif%{content}%endfor%"
#define GEMMA_ALTERNATES                                             \
  "%if(message.role=='user')!=(loop.index0%2==0)%{raise_exception('" \
  "Conversation roles must alternate user/assistant/user/assistant/...')}%endif%"
#define GEMMA_ROLE \
  "%if(message.role=='assistant')%%set role='model'%%else%%set role=message.role%%endif%"
#define GEMMA_PROMPT "%if add_generation_prompt%{'<start_of_turn>model\\n'}%endif%"

struct Known {
  std::string_view text;  // \x02 stands for any text within a literal: the default system message
  ChatFormat (*format)();
};
const Known kKnown[] = {
    {"%for message in messages%" CHATML_TURN "%endfor%" CHATML_PROMPT, chatml},
    {"%for message in messages%%if loop.first and messages[0].role!='system'%" CHATML_DEFAULT
     "%endif%" CHATML_TURN "%endfor%" CHATML_PROMPT,
     chatml},
    {"%if messages[0].role!='system'%" CHATML_DEFAULT "%endif%%for message in messages%" CHATML_TURN
     "%endfor%" CHATML_PROMPT,
     chatml},
    {LLAMA3_LOOP "%if add_generation_prompt%" LLAMA3_HEADER "%endif%",
     [] { return llama3(System::turn); }},
    {LLAMA3_LOOP LLAMA3_HEADER,
     [] {
       ChatFormat format = llama3(System::turn);
       format.always_prompts = true;
       return format;
     }},
    {"%if messages[0].role=='system'%{raise_exception('System role not supported')}%endif%"
     "%for message in messages%" GEMMA_ALTERNATES GEMMA_ROLE
     "{'<start_of_turn>'+role+'\\n'+content|trim+'<end_of_turn>\\n'}%endfor%" GEMMA_PROMPT,
     [] { return gemma(System::refused); }},
};

// ---- templates with parts for tools, which say what happens to text in a few places ----

struct Outline {
  std::vector<std::string_view> parts;  // in this order, the last at the end
  ChatFormat (*format)();
};
#define QWEN_TURN                                                                      \
  "%if(message.role=='user')or(message.role=='system'and not loop.first)%" CHATML_TURN \
  "%elif message.role=='assistant'%"
#define QWEN_SYSTEM \
  "%if messages[0].role=='system'%{'<|im_start|>system\\n'+messages[0].content+'<|im_end|>\\n'}"
#define QWEN_SPLIT "content.split('</think>')[-1].lstrip('\\n')%"
#define QWEN_REASONING \
  "content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')%"
#define QWEN_PLAIN_ANSWER "{'<|im_start|>'+message.role+'\\n'+content}"
#define QWEN_THOUGHTS                                                                          \
  "%if loop.index0>ns.last_query_index%%if loop.last or(not loop.last and reasoning_content)%" \
  "{'<|im_start|>'+message.role+'\\n<think>\\n'+reasoning_content.strip('\\n')+"               \
  "'\\n</think>\\n\\n'+content.lstrip('\\n')}%else%" QWEN_PLAIN_ANSWER                         \
  "%endif%%else%" QWEN_PLAIN_ANSWER "%endif%"
#define QWEN_LAST_QUERY \
  "%set ns=namespace(multi_step_tool=true,last_query_index=messages|length-1)%"
#define SKIPPED_THOUGHTS \
  "%if enable_thinking is defined and enable_thinking is false%{'<think>\\n\\n</think>\\n\\n'}"
#define LLAMA31_DATES "Cutting Knowledge Date: December 2023\\nToday Date: '+date_string+'\\n\\n'"

const Outline kOutlines[] = {
    // Qwen 2.5
    {{"%else%" QWEN_SYSTEM "%else%" CHATML_DEFAULT "%endif%%endif%",
      "%if(message.role=='user')or(message.role=='system'and not loop.first)or"
      "(message.role=='assistant'and not message.tool_calls)%" CHATML_TURN,
      CHATML_PROMPT},
     [] { return qwen(Thoughts::kept); }},
    // Qwen 3
    {{"%else%" QWEN_SYSTEM "%endif%%endif%", QWEN_LAST_QUERY, QWEN_TURN, "%if'</think>'in content%",
      QWEN_THOUGHTS,
      "%if add_generation_prompt%{'<|im_start|>assistant\\n'}" SKIPPED_THOUGHTS "%endif%%endif%"},
     [] { return qwen(Thoughts::qwen3); }},
    // Qwen 3 2507, thinking
    {{"%else%" QWEN_SYSTEM "%endif%%endif%", QWEN_LAST_QUERY, QWEN_TURN, "%if'</think>'in content%",
      QWEN_THOUGHTS, "%if add_generation_prompt%{'<|im_start|>assistant\\n<think>\\n'}%endif%"},
     [] {
       ChatFormat format = qwen(Thoughts::qwen3);
       format.may_skip_thoughts = false;
       format.prompt_end = "<think>\n";
       return format;
     }},
    // Qwen 3 2507, instruct
    {{"%else%" QWEN_SYSTEM "%endif%%endif%", QWEN_TURN QWEN_PLAIN_ANSWER "%if message.tool_calls%",
      CHATML_PROMPT},
     [] { return qwen(Thoughts::kept); }},
    // Qwen 3 Coder
    {{"%if messages[0].role=='system'%%set system_message=messages[0].content%%set "
      "loop_messages=messages[1:]%%else%%set loop_messages=messages%%endif%",
      "%if system_message is defined%{'<|im_start|>system\\n'+system_message}%else%",
      "%if system_message is defined%{'<|im_end|>\\n'}%else%",
      "%elif message.role=='user'or message.role=='system'or "
      "message.role=='assistant'%" CHATML_TURN,
      CHATML_PROMPT},
     [] { return qwen(Thoughts::kept); }},
    // Qwen 3.5
    {{"%else%%if messages[0].role=='system'%%set content=render_content(messages[0].content,false,"
      "true)|trim%{'<|im_start|>system\\n'+content+'<|im_end|>\\n'}%endif%%endif%",
      QWEN_LAST_QUERY, "%set content=render_content(content,true)|trim%",
      "%elif message.role=='user'%" CHATML_TURN "%elif message.role=='assistant'%",
      "%set reasoning_content=" QWEN_REASONING "%set content=" QWEN_SPLIT,
      "%if loop.index0>ns.last_query_index%{'<|im_start|>'+message.role+'\\n<think>\\n'+"
      "reasoning_content+'\\n</think>\\n\\n'+content}%else%" QWEN_PLAIN_ANSWER "%endif%",
      "%if add_generation_prompt%{'<|im_start|>assistant\\n'}" SKIPPED_THOUGHTS
      "%else%{'<think>\\n'}%endif%%endif%"},
     [] { return qwen(Thoughts::qwen35); }},
    // Llama 3.1 to 3.3
    {{"{bos_token}", "%set date_string='26 Jul 2024'%",
      "%set system_message=messages[0].content|trim%%set "
      "messages=messages[1:]%%else%%set system_message=''%%endif%",
      "{'<|start_header_id|>system<|end_header_id|>\\n\\n'}", LLAMA31_DATES,
      "{system_message+'<|eot_id|>'}", "'tool_calls'in message)%{" LLAMA3_TURN "}",
      "%if add_generation_prompt%" LLAMA3_HEADER "%endif%"},
     [] { return llama3(System::header); }},
    // Gemma 3
    {{"{bos_token}", "%set first_user_prefix=messages[0].content+'\\n\\n'%",
      "%set loop_messages=messages[1:]%",
      "%for message in loop_messages%" GEMMA_ALTERNATES GEMMA_ROLE
      "{'<start_of_turn>'+role+'\\n'+(first_user_prefix if loop.first else'')}%if content is "
      "string%{content|trim}%elif",
      "{'<end_of_turn>\\n'}%endfor%" GEMMA_PROMPT},
     [] { return gemma(System::prefix); }},
};

// Words between angle brackets that templates of the outlines have. One with others does more than
// is known here.
constexpr std::string_view kMarks[] = {
    "<|im_start|>",  "<|im_end|>",       "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",    "<|eom_id|>",       "<|python_tag|>",      "<start_of_turn>",
    "<end_of_turn>", "<start_of_image>", "<|vision_start|>",    "<|image_pad|>",
    "<|video_pad|>", "<|vision_end|>"};

bool has_other_marks(std::string_view text) {
  for (std::size_t at = 0; (at = text.find('<', at)) != text.npos; ++at) {
    const std::string_view rest = text.substr(at);
    const bool mark =
        rest.starts_with("<|") || rest.starts_with("<start_of_") || rest.starts_with("<end_of_");
    if (mark &&
        std::ranges::none_of(kMarks, [&](std::string_view m) { return rest.starts_with(m); }))
      return true;
  }
  return false;
}

// Where `pattern` is in the text from `from` on, at `from` alone if `here`; npos: nowhere. The text
// in its hole goes to `hole`. Returns the end.
std::size_t find_pattern(std::string_view text, std::size_t from, std::string_view pattern,
                         bool here, std::string& hole) {
  const std::size_t cut = pattern.find('\x02');
  const std::string_view head = pattern.substr(0, cut);
  const std::size_t at =
      here ? (text.substr(from).starts_with(head) ? from : text.npos) : text.find(head, from);
  if (at == text.npos || cut == pattern.npos) return at == text.npos ? at : at + head.size();
  const std::string_view tail = pattern.substr(cut + 1);
  const std::size_t begin = at + head.size(), end = text.find(tail, begin);
  if (end == text.npos) return end;
  hole = unescaped(text.substr(begin, end - begin));
  // A literal ends at a quote that is not escaped: the hole must not go beyond.
  if (literal(hole) != "'" + std::string(text.substr(begin, end - begin)) + "'") return text.npos;
  return end + tail.size();
}

bool fits(std::string_view text, const Known& known, ChatFormat& format) {
  std::string hole;
  std::size_t from = 0;
  ChatFormat made = known.format();
  constexpr std::string_view kUnset =
      "%if not add_generation_prompt is defined%%set add_generation_prompt=false%%endif%";
  constexpr std::string_view kBegin = "{bos_token}";
  if (text.starts_with(kUnset)) from = kUnset.size();
  if (made.name != "llama-3") {  // which has it in the first turn
    made.bos = text.substr(from).starts_with(kBegin);
    if (made.bos) from += kBegin.size();
  }
  if (find_pattern(text, from, known.text, true, hole) != text.size()) return false;
  made.has_default = known.text.find('\x02') != known.text.npos;
  made.default_system = hole;
  format = made;
  return true;
}

bool fits(std::string_view text, const Outline& outline, ChatFormat& format) {
  if (has_other_marks(text)) return false;
  ChatFormat made = outline.format();
  std::size_t from = 0;
  for (const std::string_view part : outline.parts) {
    std::string hole;
    if (&part == &outline.parts.back()) {
      if (!text.ends_with(part) || text.size() - part.size() < from) return false;
      break;
    }
    from = find_pattern(text, from, part, false, hole);
    if (from == text.npos) return false;
    if (part.find('\x02') != part.npos) {
      made.has_default = true;
      made.default_system = hole;
    }
  }
  format = made;
  return true;
}

}  // namespace

bool divides_turns(std::string_view token) {
  return std::ranges::find(kMarks, token) != std::end(kMarks);
}

Result<ChatFormat> chat_format(std::string_view jinja, std::string_view name) {
  constexpr const char* kNames = "chatml, llama-3, gemma or qwen";
  if (name == "chatml") return chatml();
  if (name == "llama-3") return llama3(System::turn);
  if (name == "gemma") return gemma(System::prefix);
  if (name == "qwen") return qwen(Thoughts::qwen3);
  if (!name.empty()) return invalid("chat format " + std::string(name) + ", expected " + kNames);
  if (jinja.empty())
    return unsupported(std::string("no chat template; choose a chat format: ") + kNames);
  const std::string text = canonical_template(jinja);
  ChatFormat format;
  for (const Known& known : kKnown)
    if (fits(text, known, format)) return format;
  for (const Outline& outline : kOutlines)
    if (fits(text, outline, format)) return format;
  return unsupported(std::string("an unknown chat template, expected one of ChatML, Llama 3, Gemma "
                                 "or Qwen; to use one of them anyway, choose a chat format: ") +
                     kNames);
}

}  // namespace bittern::text
