// The cache folder's files: their text, and how they are read, written and removed.
#include "cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <mutex>
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

constexpr long long DEFAULT_LIMIT = 1LL << 30;  // bytes, where the folder holds no other
constexpr long long LARGEST_FILE = 1LL << 28;   // that is read; kernels have less than a hundredth
constexpr long long PAGE = 4096;                // a file occupies whole ones
constexpr time_t HOUR = 3600;                   // marks of use are as exact as this
constexpr time_t MINUTE = 60;                   // a file is written in much less
const std::string LIMIT_HEAD = "factorlayer cache limit 1\nbytes ";

// Whether nobody else can have written a file, but root. As its owner is its writer, it matters less whose the folder is:
// a file that somebody else puts there is not this user's.
bool is_trusted(const struct stat& known) {
  return (known.st_uid == geteuid() || known.st_uid == 0) && !(known.st_mode & (S_IWGRP | S_IWOTH));
}

// Why an entry that is there is not loaded, or nothing.
std::string why_not_trusted(const std::string& path) {
  struct stat known;
  if (stat(path.c_str(), &known) || is_trusted(known)) return "";
  if (known.st_uid == geteuid() || known.st_uid == 0) return "; others can write to " + path + ", so it is not loaded";
  return "; " + path + " is user " + std::to_string(known.st_uid) + "'s, so it is not loaded";
}

// Of files alone: a pipe would make the process wait, a device never ends. A file whose time is not within an hour of the
// clock, either way, gets the clock's where it is to be marked as used; where it cannot be, it counts as used before.
// `to_run`: what is read will be code; then it is marked as used, and read only if it is trusted.
std::optional<std::string> read(const std::string& path, bool to_run = false) {
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  struct stat known;
  std::optional<std::string> text;
  if (!fstat(file, &known) && S_ISREG(known.st_mode) && known.st_size <= LARGEST_FILE &&
      (!to_run || is_trusted(known))) {
    text.emplace(size_t(known.st_size), '\0');
    size_t done = 0;
    while (done < text->size()) {
      const ssize_t count = ::read(file, text->data() + done, text->size() - done);
      if (count > 0) done += size_t(count);
      else if (count == 0 || errno != EINTR) break;
    }
    if (done < text->size()) text.reset();
    if (to_run && std::llabs(static_cast<long long>(std::time(nullptr)) - known.st_mtime) > HOUR) futimens(file, nullptr);
  }
  close(file);
  return text;
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

std::vector<std::string> files(const std::string& where) {
  std::vector<std::string> names;
  DIR* directory = opendir(where.c_str());
  if (!directory) return names;
  while (const dirent* file = readdir(directory)) {
    const std::string name = file->d_name;
    if (!kind_of(name).empty()) names.push_back(name);
  }
  closedir(directory);
  std::sort(names.begin(), names.end());
  return names;
}

// What a line can show of a text that anybody may have written.
std::string printable(std::string text) {
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

Entry describe(const std::string& name) {
  Entry entry{name, 0, false, kind_of(name), "", "", "", ""};
  const std::optional<std::string> text = read(folder() + "/" + name);
  if (!text) return entry;
  entry.bytes = static_cast<long long>(text->size());
  std::istringstream lines(*text);
  std::string identity;
  Entry told = entry;
  for (std::string line; std::getline(lines, line) && line.compare(0, 9, "contents ") != 0;) {
    if (identity.size() > 1 << 16) break;  // it has no such line
    identity += line + "\n";
    const std::string value = printable(line.substr(std::min(line.find(' '), line.size() - 1) + 1));
    if (line.compare(0, 5, "name ") == 0) told.name = value;
    if (line.compare(0, 13, "architecture ") == 0) told.architecture = value;
    if (line.compare(0, 9, "compiler ") == 0) told.compiler = value;
    if (line.compare(0, 8, "package ") == 0) told.package = value;
  }
  told.whole = file_of(entry.kind, identity) == name && contents_in(*text, identity).has_value();
  return told.whole ? told : entry;  // what a damaged file says of itself means nothing
}

struct File {
  std::string name;
  struct stat known;

  long long bytes() const { return (known.st_size + PAGE - 1) / PAGE * PAGE; }
  bool is_draft() const { return ends_with(name, ".tmp"); }

  // A time ahead of the clock, beyond what an hour explains, was set by another clock: it says nothing, and must not
  // keep a file for ever.
  long long unused_for(time_t now) const {
    return known.st_mtime > now + HOUR ? INT64_MAX : static_cast<long long>(now) - known.st_mtime;
  }
};

// The entries and drafts of one owner, links as themselves.
std::vector<File> files_of(const std::string& where, uid_t owner) {
  std::vector<File> found;
  for (const std::string& name : files(where)) {
    File file{name, {}};
    if (lstat((where + "/" + name).c_str(), &file.known) || file.known.st_uid != owner) continue;
    if (S_ISREG(file.known.st_mode) || S_ISLNK(file.known.st_mode)) found.push_back(file);
  }
  return found;
}

long long bytes_of(const std::vector<File>& found) {
  long long bytes = 0;
  for (const File& file : found) bytes += file.bytes();
  return bytes;
}

// Whoever writes a draft holds its lock, which a killed process does not. Where there are no locks its age decides; a
// draft that is lost while it is written is written again.
bool is_abandoned(const std::string& path, const File& draft, time_t now) {
  if (std::llabs(static_cast<long long>(now) - draft.known.st_mtime) <= MINUTE) return false;
  const int file = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (file < 0) return errno == ELOOP;
  const bool held = flock(file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK;
  close(file);
  return !held;
}

// Unless it is another file by now.
bool remove_file(const std::string& path, const File& file) {
  struct stat now;
  if (lstat(path.c_str(), &now)) return errno == ENOENT;
  if (now.st_ino != file.known.st_ino || now.st_mtime != file.known.st_mtime) return false;
  return !unlink(path.c_str()) || errno == ENOENT;
}

// Removes abandoned drafts, and where `needed` bytes more would pass the limit, entries: those that were used least
// recently, down to seven eighths of it. Returns what the owner's files then take.
long long tidy(const std::string& where, uid_t owner, time_t now, long long needed, long long most) {
  std::vector<File> found = files_of(where, owner), entries;
  long long bytes = bytes_of(found);
  for (const File& file : found) {
    const std::string path = where + "/" + file.name;
    if (!file.is_draft()) entries.push_back(file);
    else if (is_abandoned(path, file, now) && remove_file(path, file)) bytes -= file.bytes();
  }
  if (needed <= most - bytes) return bytes;
  std::sort(entries.begin(), entries.end(), [now](const File& a, const File& b) {
    const long long first = a.unused_for(now), second = b.unused_for(now);
    return first != second ? first > second : a.name < b.name;
  });
  for (const File& file : entries) {
    if (bytes <= most - most / 8 - needed) break;
    if (remove_file(where + "/" + file.name, file)) bytes -= file.bytes();
  }
  return bytes;
}

// Looks at the folder only where this process has not looked, or has written much since, or the limit is near.
void make_room(const std::string& where, const struct stat& draft, long long needed, long long most) {
  static std::mutex mutex;
  static std::string looked_at;
  static long long bytes = 0, added = 0, writes = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool is_known = looked_at == where && writes < 64 && added <= most / 64 && needed <= most - bytes - added;
  if (!is_known) {
    bytes = tidy(where, draft.st_uid, draft.st_mtime, needed, most);
    looked_at = where;
    added = writes = 0;
  }
  added += needed;
  ++writes;
}

bool write_all(int file, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(file, text.data() + done, text.size() - done);
    if (count > 0) done += size_t(count);
    else if (count == 0 || errno != EINTR) return false;
  }
  return !fsync(file);
}

// Writes a draft beside the path and moves it there. Returns 0 or the error. The draft's number begins with the clock, as
// processes of several machines and containers have the same ids.
int write_whole(const std::string& where, const std::string& name, const std::string& text, long long most) {
  static std::atomic<long long> number{std::time(nullptr) * 1000000LL};
  const std::string path = where + "/" + name;
  const std::string draft = path + "." + std::to_string(getpid()) + "." + std::to_string(number++) + ".tmp";
  const int file = open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return errno;
  flock(file, LOCK_EX | LOCK_NB);
  struct stat known;
  const long long pages = (static_cast<long long>(text.size()) + PAGE - 1) / PAGE;
  if (most && !fstat(file, &known)) make_room(where, known, pages * PAGE, most);
  const bool fine = write_all(file, text) && !rename(draft.c_str(), path.c_str());
  const int error = fine ? 0 : errno;
  if (!fine) unlink(draft.c_str());
  close(file);
  return error;
}

// Another process may remove the folder, or a draft that it takes for an abandoned one.
int write_again(const std::string& where, const std::string& name, const std::string& text, long long most) {
  int error = write_whole(where, name, text, most);
  for (int tries = 0; tries < 8 && (error == ENOENT || error == EEXIST); ++tries) {
    if (error == ENOENT && !make_folders(where)) return errno;
    error = write_whole(where, name, text, most);
  }
  return error;
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
  const std::optional<std::string> text = read(folder() + "/" + file_of(key.kind, known), true);
  return text ? contents_in(*text, known) : std::nullopt;
}

std::string store(const Key& key, const std::string& contents) {
  const std::string known = identity(key), where = folder();
  const std::string text = known + proof(contents) + contents;
  const long long most = limit(), bytes = static_cast<long long>(text.size());
  std::string reason;
  if (where.empty()) reason = "there is no home folder";
  else if (bytes > most) reason = "one has " + std::to_string(bytes) + " bytes, the limit is " + std::to_string(most);
  else if (const int error = write_again(where, file_of(key.kind, known), text, most))
    reason = std::strerror(error) + why_not_trusted(where + "/" + file_of(key.kind, known));
  if (reason.empty()) return "";
  return "factorlayer cannot keep compiled kernels in " + (where.empty() ? "its cache" : where) + " (" + reason +
         "), so every process compiles them again; " +
         (bytes > most ? "raise it by `factorlayer cache limit`" : "set FACTORLAYER_CACHE to a folder that can be written");
}

std::vector<Entry> entries() {
  std::vector<Entry> found;
  for (const std::string& name : files(folder())) found.push_back(describe(name));
  return found;
}

int remove_entries(bool all) {
  int removed = 0;
  for (const std::string& name : files(folder()))
    if (all || !describe(name).whole) removed += !unlink((folder() + "/" + name).c_str());
  return removed;
}

long long occupied() { return bytes_of(files_of(folder(), geteuid())); }

long long limit() {
  const std::optional<std::string> text = read(folder() + "/limit");
  if (!text || text->compare(0, LIMIT_HEAD.size(), LIMIT_HEAD) != 0) return DEFAULT_LIMIT;
  const std::string number = text->substr(LIMIT_HEAD.size());
  const size_t digits = number.find_first_not_of("0123456789");
  if (digits == 0 || digits > 18 || number.substr(digits) != "\n") return DEFAULT_LIMIT;
  return std::max(1LL, std::stoll(number));
}

std::string set_limit(long long bytes) {
  const std::string where = folder();
  const std::string text = LIMIT_HEAD + std::to_string(bytes) + "\n";
  const int error = where.empty() ? ENOENT : write_again(where, "limit", text, 0);
  return error ? std::strerror(error) : "";
}

}  // namespace factorlayer::cache
