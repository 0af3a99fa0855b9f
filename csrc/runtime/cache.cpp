// The cache folder's files: their text, and how they are read, written and removed.
#include "cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "sha256.h"

namespace factorlayer::cache {
namespace {

std::string identity(const Key& key) {
  return "factorlayer " + key.kind + (" 1\npackage " FACTORLAYER_VERSION "\ncompiler " + key.compiler) +
         "\narchitecture " + key.architecture + "\noptions " + key.options + "\nname " + key.name + "\nsource " +
         sha256(key.source) + "\n";
}

std::string file_of(const std::string& kind, const std::string& identity) {
  return sha256(identity).substr(0, 40) + "." + kind;
}

// Size and hash stand between identity and contents.
std::string proof(const std::string& contents) {
  return "contents " + std::to_string(contents.size()) + " " + sha256(contents) + "\n\n";
}

std::optional<std::string> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) return std::nullopt;
  return text.str();
}

// Those of a whole file with this identity.
std::optional<std::string> contents_in(const std::string& text, const std::string& identity) {
  if (text.compare(0, identity.size(), identity) != 0) return std::nullopt;
  const size_t end = text.find("\n\n", identity.size());
  if (end == std::string::npos) return std::nullopt;
  std::string contents = text.substr(end + 2);
  if (text.compare(identity.size(), end + 2 - identity.size(), proof(contents)) != 0) return std::nullopt;
  return contents;
}

bool make_folders(const std::string& path) {
  for (size_t end = 1; end != std::string::npos;) {
    end = path.find('/', end + 1);
    if (mkdir(path.substr(0, end).c_str(), 0755) && errno != EEXIST) return false;
  }
  return true;
}

bool write_whole(const std::string& path, const std::string& text) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return false;
  size_t done = 0;
  bool fine = true;
  while (fine && done < text.size()) {
    const ssize_t count = write(file, text.data() + done, text.size() - done);
    if (count > 0) done += size_t(count);
    else fine = count < 0 && errno == EINTR;
  }
  fine = fine && !fsync(file);
  const int error = errno;
  fine = !close(file) && fine;
  if (!fine) {
    unlink(path.c_str());
    errno = error;
  }
  return fine;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// What a file of this name holds, or nothing if it is not ours, so that clearing a folder removes nothing else: of
// "0123….plan" and "0123….plan.123.4.tmp", plan.
std::string kind_of(const std::string& name) {
  if (name.find_first_not_of("0123456789abcdef") != 40 || name[40] != '.') return "";
  const std::string kind = name.substr(41, name.find('.', 41) - 41);
  const bool whole_name = name.size() == 41 + kind.size() || ends_with(name, ".tmp");
  return whole_name && (kind == "kernel" || kind == "plan") ? kind : "";
}

std::vector<std::string> files() {
  std::vector<std::string> names;
  DIR* directory = opendir(folder().c_str());
  if (!directory) return names;
  while (const dirent* file = readdir(directory)) {
    const std::string name = file->d_name;
    if (!kind_of(name).empty()) names.push_back(name);
  }
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

Entry describe(const std::string& name) {
  Entry entry{name, 0, false, kind_of(name), "", "", "", ""};
  const std::optional<std::string> text = read(folder() + "/" + name);
  if (!text) return entry;
  entry.bytes = static_cast<long long>(text->size());
  std::istringstream lines(*text);
  std::string identity;
  for (std::string line; std::getline(lines, line) && line.compare(0, 9, "contents ") != 0;) {
    if (identity.size() > 1 << 16) break;  // it has no such line
    identity += line + "\n";
    const std::string value = line.substr(std::min(line.find(' '), line.size() - 1) + 1);
    if (line.compare(0, 5, "name ") == 0) entry.name = value;
    if (line.compare(0, 13, "architecture ") == 0) entry.architecture = value;
    if (line.compare(0, 9, "compiler ") == 0) entry.compiler = value;
    if (line.compare(0, 8, "package ") == 0) entry.package = value;
  }
  entry.whole = file_of(entry.kind, identity) == name && contents_in(*text, identity).has_value();
  return entry;
}

}  // namespace

std::string folder() {
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (std::string own = variable("FACTORLAYER_CACHE"); !own.empty()) return own;
  if (std::string base = variable("XDG_CACHE_HOME"); !base.empty() && base[0] == '/') return base + "/factorlayer";
  if (std::string home = variable("HOME"); !home.empty()) return home + "/.cache/factorlayer";
  return "";
}

std::optional<std::string> load(const Key& key) {
  const std::string known = identity(key);
  const std::optional<std::string> text = read(folder() + "/" + file_of(key.kind, known));
  return text ? contents_in(*text, known) : std::nullopt;
}

std::string store(const Key& key, const std::string& contents) {
  const std::string known = identity(key), where = folder();
  const std::string path = where + "/" + file_of(key.kind, known);
  static std::atomic<int> count{0};
  const std::string draft = path + "." + std::to_string(getpid()) + "." + std::to_string(count++) + ".tmp";
  if (!where.empty() && make_folders(where) && write_whole(draft, known + proof(contents) + contents)) {
    if (!rename(draft.c_str(), path.c_str())) return "";
    const int error = errno;
    unlink(draft.c_str());
    errno = error;
  }
  const std::string reason = where.empty() ? "there is no home folder" : std::strerror(errno);
  return "factorlayer cannot keep compiled kernels in " + (where.empty() ? "its cache" : where) + " (" + reason +
         "), so every process compiles them again; set FACTORLAYER_CACHE to a folder that can be written";
}

std::vector<Entry> entries() {
  std::vector<Entry> found;
  for (const std::string& name : files()) found.push_back(describe(name));
  return found;
}

int remove_entries(bool all) {
  int removed = 0;
  for (const Entry& entry : entries())
    if (all || !entry.whole) removed += !unlink((folder() + "/" + entry.file).c_str());
  return removed;
}

}  // namespace factorlayer::cache
