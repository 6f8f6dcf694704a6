use std::{fs, os::unix::fs::PermissionsExt as _, time::Duration};

use beelet_config::ProviderVersion;
use beelet_model::accounts::{Account, Asked};

use super::*;

/// Program that answers and records its requests in a file.
struct Program {
    dir: tempfile::TempDir,
    config: CredentialProviders,
}

fn program(script: &str, tokens: Option<TokenAttributes>) -> Program {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("helper");
    let asked = dir.path().join("asked");
    fs::write(&path, format!("#!/bin/sh\nread -r line\necho \"$line\" >>{}\n{script}\n", asked.display()))
        .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    let provider = CredentialProvider {
        name: "helper".to_owned(),
        match_images: vec!["*.registry.test".to_owned()],
        default_cache_duration: Duration::from_secs(3600),
        version: ProviderVersion::V1,
        args: Vec::new(),
        env: vec![("WHO".to_owned(), "me".to_owned())],
        tokens,
    };
    let config = CredentialProviders { bin_dir: dir.path().to_owned(), providers: vec![provider] };
    Program { dir, config }
}

impl Program {
    fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("asked")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn providers(&self, accounts: Option<Arc<dyn ServiceAccounts>>) -> Providers {
        Providers::open(Some(&self.config), accounts, Metrics::default()).unwrap()
    }
}

fn answer(key: &str, password: &str) -> String {
    let head = r#"{"kind":"CredentialProviderResponse","apiVersion":"credentialprovider.kubelet.k8s.io/v1""#;
    let auth = format!(r#""auth":{{"eu.registry.test":{{"username":"'"$WHO"'","password":"{password}"}}}}"#);
    format!(r#"echo '{head},"cacheKeyType":"{key}",{auth}}}'"#)
}

fn asker(service_account: &str) -> Asker {
    Asker {
        namespace: "shop".to_owned(),
        pod: "web".to_owned(),
        uid: "u1".to_owned(),
        service_account: service_account.to_owned(),
    }
}

#[tokio::test]
async fn a_program_is_asked_for_its_images_and_its_answers_are_kept() {
    let check = async |key: &str, times: [usize; 3]| {
        let program = program(&answer(key, "hush"), None);
        let providers = program.providers(None);
        let images = ["eu.registry.test/app:1", "eu.registry.test/other", "us.registry.test/app"];
        for (image, times) in images.iter().zip(times) {
            for _ in 0..2 {
                let given = providers.logins(image, &asker("")).await;
                assert_eq!(
                    (given.len(), given[0].username.as_str(), given[0].password.as_str()),
                    (1, "me", "hush")
                );
            }
            assert_eq!(program.asked().len(), times, "{key} {image}");
        }
        assert!(providers.logins("registry.test/app", &asker("")).await.is_empty());
        assert!(program.asked()[0].contains(r#""image":"eu.registry.test/app""#), "{:?}", program.asked());
    };
    check("Image", [1, 2, 3]).await;
    check("Registry", [1, 1, 2]).await;
    check("Global", [1, 1, 1]).await;
}

#[tokio::test]
async fn a_program_that_is_slow_for_one_image_is_asked_for_others_meanwhile() {
    // The program answers for the first image once another image has been requested.
    let script = format!(
        r#"case "$line" in *slow*) while ! grep -q quick "$(dirname "$0")/asked"; do sleep 0.1; done;; esac; {}"#,
        answer("Image", "hush")
    );
    let program = program(&script, None);
    let (providers, asker) = (program.providers(None), asker(""));
    let asked = |image| providers.logins(image, &asker);
    let all = async {
        tokio::join!(
            asked("eu.registry.test/slow"),
            asked("eu.registry.test/slow"),
            asked("eu.registry.test/quick")
        )
    };
    let (slow, again, quick) = tokio::time::timeout(Duration::from_secs(60), all).await.unwrap();
    assert_eq!((slow.len(), again.len(), quick.len()), (1, 1, 1));
    assert_eq!(program.asked().len(), 2, "the second pull of the slow image found the first one's answer");
}

#[tokio::test]
async fn a_program_that_fails_gives_nothing_and_is_asked_again() {
    let program = program("echo no >&2; exit 3", None);
    let providers = program.providers(None);
    assert!(providers.logins("eu.registry.test/app", &asker("")).await.is_empty());
    assert!(providers.logins("eu.registry.test/app", &asker("")).await.is_empty());
    assert_eq!(program.asked().len(), 2);
    let error =
        providers.all[0].logins("eu.registry.test/app", None, &Metrics::default()).await.err().unwrap();
    assert!(error.to_string().contains("exit status: 3") && error.to_string().contains("no"), "{error}");
}

#[test]
fn a_missing_program_is_an_error_at_once() {
    let program = program("", None);
    let open = || Providers::open(Some(&program.config), None, Metrics::default()).unwrap_err().to_string();
    let path = program.dir.path().join("helper");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(open().contains("is not an executable file"), "{}", open());
    fs::remove_file(&path).unwrap();
    assert!(open().contains("helper cannot be used: No such file"), "{}", open());
}

/// Knows one account; the test changes its token.
#[derive(Debug)]
struct OneAccount(Mutex<&'static str>);

impl ServiceAccounts for OneAccount {
    fn account<'a>(&'a self, _: &'a str, name: &'a str) -> Asked<'a, Account> {
        let annotations = BTreeMap::from([("a.test/role".to_owned(), format!("role-of-{name}"))]);
        Box::pin(async { Ok(Account { uid: "a1".to_owned(), annotations }) })
    }

    fn token<'a>(&'a self, of: &'a TokenReference) -> Asked<'a, Arc<str>> {
        let token = format!("{}-{}-{}", self.0.lock().unwrap(), of.service_account, of.audience);
        Box::pin(async move { Ok(token.into()) })
    }
}

fn tokens(cache_by_token: bool, required: &str) -> TokenAttributes {
    TokenAttributes {
        audience: "reg".to_owned(),
        require_service_account: true,
        required_annotations: vec![required.to_owned()],
        optional_annotations: Vec::new(),
        cache_by_token,
    }
}

#[tokio::test]
async fn logins_of_an_account_are_used_for_no_other_account() {
    for (by_token, times) in [(false, [1, 1, 2, 2]), (true, [1, 1, 2, 3])] {
        let program = program(&answer("Global", "hush"), Some(tokens(by_token, "a.test/role")));
        let accounts = Arc::new(OneAccount(Mutex::new("t1")));
        let providers = program.providers(Some(Arc::clone(&accounts) as Arc<dyn ServiceAccounts>));
        let image = "eu.registry.test/app";
        assert!(providers.logins(image, &asker("")).await.is_empty(), "without an account no program runs");
        for (number, account) in ["web", "web", "db", "web"].into_iter().enumerate() {
            if number == 3 {
                *accounts.0.lock().unwrap() = "t2";
            }
            let given = providers.logins(image, &asker(account)).await;
            assert_eq!(given[0].account.as_ref().unwrap().name, account);
            assert_eq!(program.asked().len(), times[number], "{by_token} {number}");
        }
        let first = &program.asked()[0];
        assert!(first.contains(r#""serviceAccountToken":"t1-web-reg""#), "{first}");
        assert!(first.contains(r#""serviceAccountAnnotations":{"a.test/role":"role-of-web"}"#), "{first}");
    }
}

#[tokio::test]
async fn an_account_without_a_required_annotation_and_an_echoed_token_get_nothing() {
    let accounts: Arc<dyn ServiceAccounts> = Arc::new(OneAccount(Mutex::new("t1")));
    let other = program(&answer("Global", "hush"), Some(tokens(false, "b.test/other")));
    let providers = other.providers(Some(Arc::clone(&accounts)));
    assert!(providers.logins("eu.registry.test/app", &asker("web")).await.is_empty());
    assert!(other.asked().is_empty());
    let echo = program(&answer("Global", "t1-web-reg"), Some(tokens(false, "a.test/role")));
    assert!(
        echo.providers(Some(Arc::clone(&accounts)))
            .logins("eu.registry.test/app", &asker("web"))
            .await
            .is_empty()
    );
    let allowed = program(&answer("Global", "t1-web-reg"), Some(tokens(true, "a.test/role")));
    assert_eq!(
        allowed.providers(Some(accounts)).logins("eu.registry.test/app", &asker("web")).await.len(),
        1
    );
}
