// The processes of one mpirun. MPI itself is in a plug-in, libbittern_mpi.so (cli/mpi_ranks.cc),
// which is opened only where mpirun has started several of them (docs/adr/0016).
#pragma once
#include "bittern/ranks.h"
#include "bittern/status.h"

namespace bittern::cli {

class Processes : public Ranks {
 public:
  virtual int here() const noexcept = 0;  // how many of them are on this machine
  virtual void finish() noexcept = 0;     // the end of this process waits for that of the others
  virtual void abort(int status) noexcept = 0;  // ends all of them now
};

// What the plug-in exports; null: it is of another version.
using ProcessesEntry = Processes* (*)(const char* version);
inline constexpr const char* kProcessesEntry = "bittern_mpi_start";

// Joins the others, if mpirun has started several. Threads become this machine's cores, shared
// among its processes, unless BITTERN_THREADS says how many.
Status join_processes();
// Null: one process.
Processes* processes();
// Whether this process prints and writes files: the first one does.
bool speaks();

}  // namespace bittern::cli
