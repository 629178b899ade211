// OUT.distill: what a run that was stopped goes on from.
//
//   asked          what the run was asked for (distill/asked.h)
//   start          the model before it learns
//   start.sum      of its numbers: a start that was damaged is not learned from
//   state          what has been learned so far (LearnState)
//   result         the model that becomes OUT
//   written_start  the start in a GGUF file's types, to compare with
//   removed        what was being removed when a run was killed
//
// Whoever kills a run leaves a folder that the next one understands: no model of which files are
// missing, no state without its start, nothing without `asked`.
#pragma once
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "bittern/status.h"

namespace bittern {

class WorkFolder {
 public:
  explicit WorkFolder(const std::string& out) : path_(out + ".distill") {}
  WorkFolder(const WorkFolder&) = delete;
  ~WorkFolder();

  const std::string& path() const { return path_; }
  std::string asked() const { return path_ + "/asked"; }
  std::string start() const { return path_ + "/start"; }
  std::string start_sum() const { return path_ + "/start.sum"; }
  std::string state() const { return path_ + "/state"; }
  std::string result() const { return path_ + "/result"; }
  std::string written_start() const { return path_ + "/written_start"; }
  bool has_start() const;
  bool has_state() const;

  // Makes the folder, or takes over one that a run left: to go on with it, or, by force, to empty
  // it. Until this is destroyed no other run can.
  Status open(bool resume, bool force);
  // After a failure: the folder is removed if there is nothing in it to go on with.
  void remove_if_empty() const;
  std::error_code remove() const;
  // What an earlier run wrote after it had learned: it is written again.
  Status remove_results() const;

 private:
  std::string removed() const { return path_ + "/removed"; }
  std::error_code clear() const;
  std::error_code remove_each(const std::vector<std::filesystem::path>& paths) const;
  Status check_ours() const;
  Status lock();

  std::string path_;
  int lock_ = -1;
  bool ours_ = false;  // made by this run or an earlier one
};

}  // namespace bittern
