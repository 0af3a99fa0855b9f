// Compiled kernels and plans on disk, one file each, shared by processes, package versions and GPUs.
//
// A file is named by the hash of all that can change its contents. It begins with these as text (the source as its
// hash), so that `factorlayer cache list` can tell what it holds, then has the contents' size and hash, then the
// contents. Files are written whole or not at all; what cannot be read back whole counts as missing and is made again.
//
// What one user's files take has a limit, which the folder holds in a file of its own, so that all who share it agree. A
// file's time is that of its last use, to the hour: only who writes looks whether there is room, and removes those of his
// own files that were used least recently. Reading costs no more for it.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace factorlayer::cache {

// A plan has the chain, dtype and class of batch sizes as name, or what else the planner was asked of a chain, the GPU's limits with the architecture, its planner as
// source, and no compiler and options.
struct Key {
  std::string kind;  // kernel or plan
  std::string name, architecture, options, compiler, source;
};

// $FACTORLAYER_CACHE, else $XDG_CACHE_HOME/factorlayer, else ~/.cache/factorlayer; empty if there is no home either.
std::string folder();

std::optional<std::string> load(const Key& key);

// Returns what went wrong, or nothing. A cache that cannot be written costs time, never a result.
std::string store(const Key& key, const std::string& contents);

struct Entry {
  std::string file;
  long long bytes;
  bool whole;
  std::string kind, name, architecture, compiler, package;
};

// By name of the file. Leftovers of processes that were killed while writing are entries that are not whole.
std::vector<Entry> entries();

// Removes the entries that are not whole, or all. Returns how many.
int remove_entries(bool all);

// Bytes of this user's files, in whole pages, and the most there may be.
long long occupied();
long long limit();

// Returns what went wrong, or nothing. Below 10^18; the next who writes keeps to it.
std::string set_limit(long long bytes);

}  // namespace factorlayer::cache
